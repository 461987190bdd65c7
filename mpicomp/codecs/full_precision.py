"""No compression: what methods send back that compress on the way there alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.kernels.cpu.sixteen_bits import narrow, widen


@dataclass(frozen=True, slots=True)
class FullPrecision:
    """Values as they are; float32 ones as 16 bits where the vector has them."""

    dtype: str

    alignment: ClassVar[int] = 64

    @property
    def _stored(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)

    def nbytes(self, n: int, weight: int = 1) -> int:
        """As many as the vector has."""
        return n * self._stored.itemsize

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Nothing is drawn. Unlike other codecs it sends NaN and infinity as they are: reducers look at the result."""
        check_size(self, payload, values.size, 1)
        stored = payload.view(self._stored)
        if self._stored.itemsize == 2:
            narrow(values, self.dtype == "bfloat16", stored.view(np.uint16))
        else:
            stored[:] = values

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Exact."""
        check_size(self, payload, values.size, weight)
        stored = payload.view(self._stored)
        if self._stored.itemsize == 2:
            widen(stored.view(np.uint16), self.dtype == "bfloat16", values)
        else:
            values[:] = stored
