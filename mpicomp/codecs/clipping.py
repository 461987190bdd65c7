"""Clipping: the leading bits of each float32 (sign, exponent, and what is left of the mantissa). Rounds towards zero.

Wire format: the first whole bytes as columns, all elements' highest byte, then all elements' next one, zeros up to a
multiple of 8 bytes; then the bits that are left as bit planes, the highest last.

Reference: DoubleSqueeze (Tang et al., ICML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.options import integer
from mpicomp.kernels.cpu.clipping import join_bytes, split_bytes
from mpicomp.kernels.cpu.planes import pack_planes, powers_of_two, unpack_planes
from mpicomp.kernels.cpu.sign import all_finite

_POWERS = powers_of_two(8, np.uint8)
_EXPONENT = np.uint32(0x7F800000)


@dataclass(frozen=True, slots=True)
class Clipping:
    """The leading bits of float32 values; of float64 ones, rounded to float32.

    Parameters
    ----------
    bits : int
        Kept of each element, 9 (sign and exponent) to 32.

    Raises
    ------
    ValueError
        `bits` is out of range.
    """

    bits: int = 16

    def __post_init__(self) -> None:
        integer(self, "bits", 9, 32)

    alignment: ClassVar[int] = 64

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Whole bytes of each element, rounded up to 8, and the bits that are left, rounded up to words."""
        return self._columns_end(n) + 8 * (self.bits % 8) * -(-n // 64)

    def _columns_end(self, n: int) -> int:
        return -(-(self.bits // 8) * n // 8) * 8

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Nothing is drawn. Raises ValueError if a value is not finite."""
        n = values.size
        columns, planes = self._parts(payload, n, 1)
        if not all_finite(values):
            raise ValueError("the values contain NaN or infinity")
        words = np.clip(values, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32, copy=False).view(np.uint32)
        split_bytes(words, columns)
        payload[columns.size : self._columns_end(n)] = 0
        if planes.size:
            rest = ((words >> np.uint32(24 - 8 * len(columns))) & np.uint32(255)).astype(np.uint8)
            pack_planes(rest >> np.uint8(8 - self.bits % 8), _POWERS, planes)

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """What is left of each element; one that damage made NaN or infinite counts as 0."""
        n = values.size
        columns, planes = self._parts(payload, n, weight)
        words = np.empty(n, np.uint32)
        join_bytes(columns, words)
        if planes.size:
            rest = np.empty(n, np.uint8)
            unpack_planes(planes, _POWERS, rest)
            words |= rest.astype(np.uint32) << np.uint32(32 - self.bits)
        words[(words & _EXPONENT) == _EXPONENT] = 0
        values[:] = words.view(np.float32)

    def _parts(self, payload: Bytes, n: int, weight: int) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        check_size(self, payload, n, weight)
        whole, rest = divmod(self.bits, 8)
        columns = payload[: whole * n].reshape(whole, n)
        return columns, payload[self._columns_end(n) :].view(np.uint64).reshape(rest, -(-n // 64))
