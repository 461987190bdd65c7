"""Rounded: each value in float16 or bfloat16, the nearest there is.

Wire format: the elements one after the other, 2 bytes each in the machine's byte order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from mpicomp import kernels
from mpicomp.codecs.base import Bytes, Draw, check_size, checked


@dataclass(frozen=True, slots=True)
class Rounded:
    """Values rounded to nearest, ties to even; float64 ones to float32 before.

    Parameters
    ----------
    dtype : "float16" or "bfloat16"
        float16 is exact to 2^-11 of a value from 6.1e-5 to 65504, and to 3e-8 below; bfloat16 to 2^-8 of any value.
    """

    dtype: Literal["float16", "bfloat16"]

    alignment: ClassVar[int] = 64
    encodes_on_devices: ClassVar[bool] = True

    @property
    def out_of_range(self) -> str:
        """See `Extended`. The largest bfloat16 is that of float32, almost."""
        cure = "pass wire='bfloat16', or scale the gradients down, as torch.amp.GradScaler does"
        return f"beyond the range of float16, which ends at 65504; {cure}" if self.dtype == "float16" else ""

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Two an element."""
        return 2 * n

    def encode(self, values: Any, payload: Bytes, *, draw: Draw) -> Any:
        """Nothing is drawn. Raises ValueError for NaN or infinity, OverflowError where a finite value is too large."""
        check_size(self, payload, len(values), 1)
        on = kernels.beside(values)
        well = on.sixteen_bits.narrow(values, self.dtype == "bfloat16", on.arrays.view(payload, "uint16"))
        if isinstance(values, np.ndarray) and not well and on.sign.all_finite(values):
            raise OverflowError(f"a value is too large for {self.dtype}")
        return checked(well)

    def decode(self, payload: Bytes, values: Any, *, weight: int) -> None:
        """Exact; NaN and infinity, which only damage can bring, are written as they are."""
        check_size(self, payload, len(values), weight)
        on = kernels.beside(values)
        on.sixteen_bits.widen(on.arrays.view(payload, "uint16"), self.dtype == "bfloat16", values)

    def add(self, payload: Bytes, sums: Any) -> None:
        """Add what `decode` would write."""
        check_size(self, payload, len(sums), 1)
        on = kernels.beside(sums)
        on.sixteen_bits.add(on.arrays.view(payload, "uint16"), self.dtype == "bfloat16", sums)
