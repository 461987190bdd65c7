"""No compression, for methods that compress on the way to the owner alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from collectives.annotations import Array, Bytes, override
from collectives.memory import SIXTEEN_BIT
from mpicomp import kernels
from mpicomp.codecs.base import Codec, Draw, check_size


@dataclass(frozen=True, slots=True)
class FullPrecision(Codec):
    """Sends values unchanged; float32 values as 16 bits if the vector has 16-bit elements.

    NaN and infinity are sent too, unlike by other codecs: reducers check the result.

    Parameters
    ----------
    dtype : str
        Type of the vector's elements.
    """

    dtype: str

    alignment: ClassVar[int] = 64
    encodes_on_devices: ClassVar[bool] = True

    @property
    def _stored(self) -> str:
        return "uint16" if self.dtype in SIXTEEN_BIT else self.dtype

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return n * np.dtype(self._stored).itemsize

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> bool:
        on, stored = self._parts(payload, len(values), 1)
        if stored.itemsize == 2:
            on.sixteen_bits.narrow(values, self.dtype == "bfloat16", stored)
        else:
            stored[:] = values
        return True

    @override
    def decode(self, payload: Bytes, values: Array, *, weight: int) -> None:
        on, stored = self._parts(payload, len(values), weight)
        if stored.itemsize == 2:
            on.sixteen_bits.widen(stored, self.dtype == "bfloat16", values)
        else:
            values[:] = stored

    def _parts(self, payload: Bytes, n: int, weight: int) -> tuple[kernels.Kernels, Array]:
        """Return the kernels and a view of the elements."""
        check_size(self, payload, n, weight)
        on = kernels.beside(payload)
        return on, on.arrays.view(payload, self._stored)
