"""One bit per element, unbiased: SSDM's stochastic sign, with the tensor's norm beside it.

Bit 1 with probability 1/2 + x_i / (2 N), N = ||x||_2; decodes to +-N, whose mean is x_i.

Wire format: N as little-endian float32, four zero bytes, then bits as in `mpicomp.codecs.sign`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs.base import Bytes, Draw, check_size, checked
from mpicomp.kernels.streams import BLOCK

HEADER = 8
_NOTHING = {4: np.float32(0), 8: np.float64(0)}  # by the size of an element


def measure(values: Any, out: Any) -> None:
    """Overwrite one float32 with the two-norm, summed in float64 and rounded once; both are in one memory.

    The largest float32 where it is beyond; infinity where the squares of float64 values are beyond that type.
    """
    kernels.beside(values).ssdm.norm(values, out)


def norm(values: NDArray[Any]) -> np.float32:
    """The two-norm of an array: see `measure`."""
    found = np.empty(1, np.float32)
    measure(values, found)
    return np.float32(found[0])


@dataclass(frozen=True, slots=True)
class StochasticSign:
    """SSDM's codec for float32 values."""

    alignment: ClassVar[int] = BLOCK
    encodes_on_devices: ClassVar[bool] = True

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Header and eight bytes per 64 elements."""
        return HEADER + 8 * -(-n // 64)

    def encode(self, values: Any, payload: Bytes, *, draw: Draw) -> Any:
        """Draw each element's sign. Raises ValueError if a value is not finite."""
        check_size(self, payload, len(values), 1)
        on = kernels.beside(values)
        header, bits = on.arrays.view(payload[:HEADER], "float32"), on.arrays.view(payload[HEADER:], "uint64")
        header[1:] = 0
        measure(values, header[:1])
        well = checked(on.arrays.xp.isfinite(header[0]))
        at = np.uint64(draw.offset), np.uint64(draw.step & 0xFFFFFFFF), draw.source
        nothing = _NOTHING[values.itemsize]
        scale = np.float64(header[0]) if isinstance(header, np.ndarray) else header[:1]
        on.ssdm.stochastic_signs(draw.stream.schedule(), *at, values, None, None, nothing, nothing, scale, bits)
        return well

    def decode(self, payload: Bytes, values: Any, *, weight: int) -> None:
        """Write +N or -N for each element; a damaged norm that is not finite counts as 0."""
        self._spread(payload, values, weight, adding=False)

    def add(self, payload: Bytes, sums: Any) -> None:
        """Add what `decode` would write to `sums`. Raises ValueError for a wrong size."""
        self._spread(payload, sums, 1, adding=True)

    def _spread(self, payload: Bytes, values: Any, weight: int, adding: bool) -> None:
        check_size(self, payload, len(values), weight)
        on = kernels.beside(values)
        scale = on.arrays.view(payload[:4], "float32").reshape(1, 1)
        bits = on.arrays.view(payload[HEADER:], "uint64")
        on.bucketed.spread(bits, scale, max(1, len(values)), values, adding)
