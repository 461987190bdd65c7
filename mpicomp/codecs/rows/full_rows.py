"""Rows in full precision, or rounded to 16 bits: the baselines of `RowQuantizer`.

Wire format: the elements, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from collectives.annotations import Bytes, FloatArray, override
from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Draw
from mpicomp.codecs.rows.row_codec import AddingRows, Keys, Rows, check_pair, check_payload, check_rows


@dataclass(frozen=True, slots=True)
class FullRows(AddingRows):
    """Sends float32 rows unchanged, or rounded to 16 bits.

    `encode_delta` sends the values themselves, as on a first visit: both messages become the decoded values.

    Parameters
    ----------
    dtype : "float32", "float16" or "bfloat16"
        Type of the elements in a payload.

    Raises
    ------
    ValueError
        `dtype` is another type.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import FullRows
    >>> codec = FullRows("bfloat16")
    >>> values = np.array([[1.0, 1 / 3]], np.float32)
    >>> payload = np.empty(codec.nbytes(rows=1, columns=2), np.uint8)
    >>> codec.encode(values, payload)
    >>> codec.decode(payload, values)
    >>> values
    array([[1.        , 0.33398438]], dtype=float32)
    """

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        options.choice(self, "dtype", ("float32", "float16", "bfloat16"))

    @override
    def nbytes(self, rows: int, columns: int) -> int:
        return (4 if self.dtype == "float32" else 2) * rows * columns

    @override
    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        check_rows("the values", values)
        check_payload(self, payload, values.shape)
        flat, cpu = values.reshape(-1), kernels.of("cpu")
        if self.dtype == "float32":
            payload[:] = flat.view(np.uint8)
            finite = fits = cpu.sign.all_finite(flat)
        else:
            fits = cpu.sixteen_bits.narrow(flat, self.dtype == "bfloat16", payload.view(np.uint16))
            finite = fits or cpu.sign.all_finite(flat)
        if not finite:
            raise ValueError("the values contain NaN or infinity: the activations diverged")
        if not fits:
            raise OverflowError(f"a value is too large for {self.dtype}: use dtype='float32'")

    @override
    def encode_delta(
        self, values: Rows, message: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None
    ) -> None:
        check_pair(values, message)
        self.encode(values, payload)
        self._decode(payload, message, adding=True)

    @override
    def _decode(self, payload: Bytes, out: Rows, adding: bool) -> None:
        # values, not differences: they replace a message
        flat: FloatArray = out.reshape(-1)
        if self.dtype == "float32":
            flat.view(np.uint8)[:] = payload
        else:
            kernels.of("cpu").sixteen_bits.widen(payload.view(np.uint16), self.dtype == "bfloat16", flat)
        # only damage brings NaN and infinity
        if not kernels.of("cpu").sign.all_finite(flat):
            np.nan_to_num(flat, copy=False, nan=0, posinf=0, neginf=0)
