"""What codecs of rows have in common: their methods, and the checks of what they are given."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw

Rows = NDArray[np.float32]
Keys = NDArray[np.int64]


class RowCodec(Protocol):
    """Matrices to bytes and back, such as `mpicomp.codecs.rows.RowQuantizer`. Without state; its repr names it."""

    def nbytes(self, rows: int, columns: int) -> int:
        """Exact size of a payload."""
        ...

    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        """Overwrite the payload.

        Parameters
        ----------
        values : float32[..., columns]
        payload : uint8[nbytes(rows, columns)]
        draw : Draw, optional
            Of codecs that round at random.
        row_keys : int64[rows], optional
            What stands for each row in the random stream; None: its number.
        """
        ...

    def decode(self, payload: Bytes, values: Rows) -> None:
        """Overwrite the values, of shape (..., columns)."""
        ...


class DeltaCodec(RowCodec, Protocol):
    """A codec that can also send rows as differences to a message that both ends have."""

    def encode_delta(
        self, values: Rows, message: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None
    ) -> None:
        """Overwrite the payload, and change the message as `decode_delta` does on the other end."""
        ...

    def decode_delta(self, payload: Bytes, message: Rows) -> None:
        """Change the message by what the payload decodes to."""
        ...


def check_rows(what: str, rows: NDArray[Any]) -> None:
    """Raise ValueError unless these are float32 rows in one piece."""
    if rows.dtype != np.float32 or not rows.flags.c_contiguous or rows.ndim < 1 or rows.shape[-1] < 1:
        raise ValueError(
            f"{what} must be C-contiguous float32 rows of one column or more, not {rows.dtype} of shape {rows.shape}: "
            f"pass np.ascontiguousarray(x, np.float32)"
        )


def check_pair(values: NDArray[Any], message: NDArray[Any]) -> None:
    """Raise ValueError unless the values and their message are rows of one shape."""
    check_rows("the values", values)
    check_rows("the message", message)
    if values.shape != message.shape:
        raise ValueError(
            f"the values have shape {values.shape}, their message {message.shape}: pass that example's own"
        )


def check_payload(codec: RowCodec, payload: Bytes, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the payload has the size that rows of this shape need."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    expected = codec.nbytes(rows, columns)
    if payload.dtype != np.uint8 or payload.ndim != 1 or not payload.flags.c_contiguous or payload.size != expected:
        raise ValueError(
            f"{codec}: a payload of {rows} rows of {columns} has {expected} bytes of uint8, "
            f"this one {payload.size} of {payload.dtype}: it is damaged, or of rows of another shape"
        )
