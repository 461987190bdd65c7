"""No compression: what methods send back that compress on the way there alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from collectives.arrays.elements import SIXTEEN_BIT
from mpicomp import kernels
from mpicomp.codecs.base import Bytes, Draw, check_size


@dataclass(frozen=True, slots=True)
class FullPrecision:
    """Values as they are; float32 ones as 16 bits where the vector has them."""

    dtype: str

    alignment: ClassVar[int] = 64

    encodes_on_devices: ClassVar[bool] = True

    @property
    def _stored(self) -> str:
        return "uint16" if self.dtype in SIXTEEN_BIT else self.dtype

    def nbytes(self, n: int, weight: int = 1) -> int:
        """As many as the vector has."""
        return n * np.dtype(self._stored).itemsize

    def encode(self, values: Any, payload: Bytes, *, draw: Draw) -> Any:
        """Nothing is drawn. Unlike other codecs it sends NaN and infinity as they are: reducers look at the result."""
        on, stored = self._parts(payload, len(values), 1)
        if stored.itemsize == 2:
            on.sixteen_bits.narrow(values, self.dtype == "bfloat16", stored)
        else:
            stored[:] = values
        return True

    def decode(self, payload: Bytes, values: Any, *, weight: int) -> None:
        """Exact."""
        on, stored = self._parts(payload, len(values), weight)
        if stored.itemsize == 2:
            on.sixteen_bits.widen(stored, self.dtype == "bfloat16", values)
        else:
            values[:] = stored

    def _parts(self, payload: Bytes, n: int, weight: int) -> tuple[kernels.Kernels, Any]:
        """Kernels, and the elements in place; raises ValueError for a wrong size."""
        check_size(self, payload, n, weight)
        on = kernels.beside(payload)
        return on, on.arrays.view(payload, self._stored)
