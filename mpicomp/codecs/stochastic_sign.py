"""One bit per element, unbiased: SSDM's stochastic sign and the tensor's norm.

Bit 1 with probability 1/2 + x_i / (2 N), N = ||x||_2; decodes to +-N, whose mean is x_i.

Wire format: N as little-endian float32, four zero bytes, then bits as in `mpicomp.codecs.sign`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from collectives.annotations import Array, Bytes, FloatArray, override
from mpicomp import kernels
from mpicomp.codecs.base import Draw, Finite, SpreadingCodec, check_size, require_finite
from mpicomp.kernels.streams import BLOCK

HEADER = 8
_ZEROS = {4: np.float32(0), 8: np.float64(0)}  # by the size of an element


def measure(values: Array, out: Array) -> None:
    """Overwrite one float32 with the two-norm, summed in float64 and rounded once."""
    # a norm beyond float32 becomes its largest number; infinite if the squares of float64 values overflow
    kernels.of("cpu").ssdm.norm(values, out)


def norm(values: FloatArray) -> np.float32:
    """Return the two-norm of an array, as `measure` computes it."""
    found = np.empty(1, np.float32)
    measure(values, found)
    return np.float32(found[0])


@dataclass(frozen=True, slots=True)
class StochasticSign(SpreadingCodec):
    """SSDM's codec for float32 values: each sign is drawn so that the decoded mean is the value.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, StochasticSign
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = StochasticSign(), np.array([3.0, -4.0, 0.0], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> decoded, total = np.empty_like(values), np.zeros(3)
    >>> for step in range(1000):
    ...     _ = codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step, rank=0))
    ...     codec.decode(payload, decoded, weight=1)
    ...     total += decoded
    >>> decoded
    array([-5., -5.,  5.], dtype=float32)
    >>> bool(abs(total / 1000 - values).max() < 0.5)
    True
    """

    alignment: ClassVar[int] = BLOCK

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return HEADER + 8 * -(-n // 64)

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        check_size(self, payload, len(values), 1)
        header, bits = payload[:HEADER].view(np.float32), payload[HEADER:].view(np.uint64)
        header[1:] = 0
        measure(values, header[:1])
        well = require_finite(np.isfinite(header[0]))
        at = np.uint64(draw.offset), np.uint64(draw.step & 0xFFFFFFFF), draw.source
        zero, scale, kernel = _ZEROS[values.itemsize], np.float64(header[0]), kernels.of("cpu").ssdm.stochastic_signs
        kernel(draw.stream.schedule(), *at, values, None, None, zero, zero, scale, bits)
        return well

    @override
    def _spread(self, payload: Bytes, out: Array, weight: int, adding: bool) -> None:
        check_size(self, payload, len(out), weight)
        scale, bits = payload[:4].view(np.float32).reshape(1, 1), payload[HEADER:].view(np.uint64)
        kernels.of("cpu").bucketed.spread(bits, scale, max(1, len(out)), out, adding)
