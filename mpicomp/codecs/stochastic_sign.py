"""One bit per element, unbiased: SSDM's stochastic sign, with the tensor's norm beside it.

Bit 1 with probability 1/2 + x_i / (2 N), N = ||x||_2; decodes to +-N, whose mean is x_i.

Wire format: N as little-endian float32, four zero bytes, then bits as in `mpicomp.codecs.sign`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.kernels.cpu.bucketed import L2, norms
from mpicomp.kernels.cpu.sign import unpack
from mpicomp.kernels.cpu.ssdm import stochastic_signs
from mpicomp.kernels.streams import BLOCK

HEADER = 8


def norm(values: NDArray[Any]) -> np.float32:
    """Two-norm, summed in float64 and rounded once; the largest float32 where that of finite values would overflow."""
    sums = np.empty(-(-values.size // BLOCK), np.float64)
    norms(values, BLOCK, L2, sums)
    root = np.sqrt(sums.sum())
    return np.float32(min(root, np.finfo(np.float32).max) if np.isfinite(root) else root)


@dataclass(frozen=True, slots=True)
class StochasticSign:
    """SSDM's codec for float32 values."""

    alignment: ClassVar[int] = BLOCK

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Header and eight bytes per 64 elements."""
        return HEADER + 8 * -(-n // 64)

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Draw each element's sign. Raises ValueError if a value is not finite."""
        check_size(self, payload, values.size, 1)
        scale = norm(values)
        if not np.isfinite(scale):
            raise ValueError("the values contain NaN or infinity")
        payload[:HEADER].view(np.float32)[:] = (scale, 0)
        at = np.uint64(draw.offset), np.uint64(draw.step & 0xFFFFFFFF), draw.source
        nothing, bits = values.dtype.type(0), payload[HEADER:].view(np.uint64)
        stochastic_signs(draw.stream.schedule(), *at, values, None, None, nothing, nothing, np.float64(scale), bits)

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write +N or -N for each element; a damaged norm that is not finite counts as 0."""
        check_size(self, payload, values.size, weight)
        scale = payload[:4].view(np.float32)[0]
        words = UNSIGNED[values.itemsize]
        signed = np.array([scale, -scale] if np.isfinite(scale) else [0, 0], values.dtype).view(words)
        unpack(payload[HEADER:].view(np.uint64), signed[0], signed[1], False, values.view(words))
