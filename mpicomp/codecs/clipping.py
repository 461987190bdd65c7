"""Clipping: the leading bits of each float32 (sign, exponent, and a part of the mantissa). Rounds towards zero.

Wire format: the whole bytes as columns, all elements' highest byte, then all elements' next one, zeros up to a multiple
of 8 bytes; then the remaining bits as bit planes, the highest last.

Reference: DoubleSqueeze (Tang et al., ICML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from collectives.annotations import Array, Bytes, override
from mpicomp import kernels
from mpicomp.codecs.base import Codec, Draw, Finite, check_size, require_finite
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.options import integer
from mpicomp.kernels.cpu.planes import powers_of_two

_POWERS = powers_of_two(8, np.uint8)


@dataclass(frozen=True, slots=True)
class Clipping(Codec):
    """Keeps the leading bits of float32 values. float64 values are rounded to float32 first.

    Parameters
    ----------
    bits : int
        Bits kept of each element, 9 (sign and exponent) to 32.

    Raises
    ------
    ValueError
        `bits` is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Clipping, Draw
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = Clipping(bits=12), np.array([1.0, -0.3, 100.7], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> decoded = np.empty_like(values)
    >>> codec.decode(payload, decoded, weight=1)
    >>> decoded
    array([ 1.     , -0.28125, 96.     ], dtype=float32)
    """

    bits: int = 16

    def __post_init__(self) -> None:
        integer(self, "bits", 9, 32)

    alignment: ClassVar[int] = 64
    encodes_on_devices: ClassVar[bool] = True

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return self._columns_end(n) + 8 * (self.bits % 8) * -(-n // 64)

    def _columns_end(self, n: int) -> int:
        return -(-(self.bits // 8) * n // 8) * 8

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        on, n = kernels.beside(values), len(values)
        arrays, (columns, planes) = on.arrays, self._parts(payload, n, 1)
        finite = require_finite(on.sign.all_finite(values))
        bounded = arrays.xp.clip(values, -FLOAT32_MAX, FLOAT32_MAX)
        words = arrays.view(arrays.convert(bounded, "float32"), "uint32")
        on.planes.split_bytes(words, columns)
        whole, left = divmod(self.bits, 8)
        payload[whole * n : self._columns_end(n)] = 0
        if left:
            rest = arrays.convert((words >> (24 - 8 * whole)) & 255, "uint8")
            on.planes.pack_planes(rest >> (8 - left), _POWERS, planes)
        return finite

    @override
    def decode(self, payload: Bytes, values: Array, *, weight: int) -> None:
        on, n = kernels.beside(values), len(values)
        arrays, (columns, planes) = on.arrays, self._parts(payload, n, weight)
        itself = values.itemsize == 4
        words, rest = arrays.view(values, "uint32") if itself else arrays.empty(values, n, "uint32"), None
        if self.bits % 8:
            rest = arrays.empty(values, n, "uint8")
            on.planes.unpack_planes(planes, _POWERS, rest)
        on.planes.join_bytes(columns, rest, 32 - self.bits, words)
        if not itself:
            values[:] = arrays.view(words, "float32")

    def _parts(self, payload: Bytes, n: int, weight: int) -> tuple[Array, Array]:
        check_size(self, payload, n, weight)
        whole, rest = divmod(self.bits, 8)
        planes = kernels.beside(payload).arrays.view(payload[self._columns_end(n) :], "uint64")
        return payload[: whole * n].reshape(whole, n), planes.reshape(rest, -(-n // 64))
