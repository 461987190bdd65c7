"""Values in full precision, or rounded to 16 bits.

Wire format: the elements one after the other, in the machine's byte order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from collectives.annotations import Array, Bytes, override
from collectives.arrays.elements import NARROW
from mpicomp import kernels
from mpicomp.codecs.base import AveragingCodec, Codec, Draw, Finite, check_size, require_finite


@dataclass(frozen=True, slots=True)
class FullPrecision(Codec):
    """Sends values unchanged, or float32 values as 16 bits if the vector's `dtype` has 16."""

    # Methods that compress only on the way to the owner send results back with this codec. NaN and infinity are sent
    # too, unlike by other codecs: reducers check the result.
    dtype: str

    alignment: ClassVar[int] = 64
    encodes_on_devices: ClassVar[bool] = True

    @property
    def _stored(self) -> str:
        return "uint16" if self.dtype in NARROW else self.dtype

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


@dataclass(frozen=True, slots=True)
class Rounded(AveragingCodec):
    """Rounds values to nearest, ties to even."""

    # float64 values are rounded to float32 first. float16 is exact to 2^-11 of a value from 6.1e-5 to 65504, and to
    # 3e-8 below; bfloat16 to 2^-8 of any value.
    dtype: Literal["float16", "bfloat16"]

    alignment: ClassVar[int] = 64
    encodes_on_devices: ClassVar[bool] = True

    @property
    @override
    def out_of_range(self) -> str:
        # bfloat16 holds nearly all of float32
        cure = "pass wire='bfloat16', or scale the gradients down, as torch.amp.GradScaler does"
        return f"beyond the range of float16, which ends at 65504; {cure}" if self.dtype == "float16" else ""

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return 2 * n

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        check_size(self, payload, len(values), 1)
        on = kernels.beside(values)
        well = on.sixteen_bits.narrow(values, self.dtype == "bfloat16", on.arrays.view(payload, "uint16"))
        if isinstance(values, np.ndarray) and not well and on.sign.all_finite(values):
            raise OverflowError(f"a value is too large for {self.dtype}")
        return require_finite(well)

    @override
    def decode(self, payload: Bytes, values: Array, *, weight: int) -> None:
        check_size(self, payload, len(values), weight)
        on = kernels.beside(values)
        on.sixteen_bits.widen(on.arrays.view(payload, "uint16"), self.dtype == "bfloat16", values)

    @override
    def add(self, payload: Bytes, sums: Array) -> None:
        check_size(self, payload, len(sums), 1)
        on = kernels.beside(sums)
        on.sixteen_bits.add(on.arrays.view(payload, "uint16"), self.dtype == "bfloat16", sums)
