"""Rows in full precision, or as 16 bits: the baselines of `RowQuantizer`, with the same methods.

Wire format: the elements, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Bytes, Draw
from mpicomp.codecs.rows_base import Keys, Rows, check_pair, check_payload, check_rows


@dataclass(frozen=True, slots=True)
class FullRows:
    """float32 rows as they are, or rounded to 16 bits.

    Parameters
    ----------
    dtype : "float32", "float16" or "bfloat16"

    Raises
    ------
    ValueError
        It is another one.
    """

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        options.choice(self, "dtype", ("float32", "float16", "bfloat16"))

    def nbytes(self, rows: int, columns: int) -> int:
        """4 or 2 bytes for each element."""
        return (4 if self.dtype == "float32" else 2) * rows * columns

    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        """Overwrite the payload; nothing is drawn.

        Raises ValueError for NaN or infinity, and OverflowError for values that 16 bits cannot hold.
        """
        check_rows("the values", values)
        check_payload(self, payload, values.shape)
        flat = values.reshape(-1)
        cpu = kernels.of("cpu")
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

    def decode(self, payload: Bytes, values: Rows) -> None:
        """Overwrite the values; what damage made NaN or infinite counts as 0. Raises ValueError for a wrong size."""
        check_rows("the values", values)
        self._read(payload, values)

    def encode_delta(
        self,
        values: Rows,
        message: Rows,
        payload: Bytes,
        draw: Draw | None = None,
        row_keys: Keys | None = None,
    ) -> None:
        """Send the values themselves, as on a first visit: the message becomes what they decode to."""
        check_pair(values, message)
        self.encode(values, payload)
        self._read(payload, message)

    def decode_delta(self, payload: Bytes, message: Rows) -> None:
        """The message becomes what the payload decodes to."""
        check_rows("the message", message)
        self._read(payload, message)

    def _read(self, payload: Bytes, out: Rows) -> None:
        check_payload(self, payload, out.shape)
        flat: NDArray[Any] = out.reshape(-1)
        if self.dtype == "float32":
            flat.view(np.uint8)[:] = payload
        else:
            kernels.of("cpu").sixteen_bits.widen(payload.view(np.uint16), self.dtype == "bfloat16", flat)
        if not kernels.of("cpu").sign.all_finite(flat):
            np.nan_to_num(flat, copy=False, nan=0, posinf=0, neginf=0)
