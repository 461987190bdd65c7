"""Contract of the codecs of rows, and checks of their arguments."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from collectives.annotations import AnyArray, Bytes, Indices, override
from mpicomp.codecs.base import Draw

Rows = NDArray[np.float32]
Keys = Indices


class RowCodec(Protocol):
    """Turns matrices into bytes and back, as `mpicomp.codecs.RowQuantizer` does.

    A codec of rows has no state. Both ends of a link compare its repr, so that must name all options.
    """

    __slots__ = ()

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the exact size of a payload."""
        ...

    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        """Overwrite the payload.

        Parameters
        ----------
        values : float32[..., columns]
        payload : uint8[nbytes(rows, columns)]
        draw : Draw, optional
            Stream, step and rank, for codecs that round at random. The offset is ignored.
        row_keys : int64[rows], optional
            Number of each row in the random stream, 0 or more, such as example times tokens plus token.
            None: 0, 1, 2, ...

        Raises
        ------
        ValueError
            A row has NaN or infinity, or an array has the wrong shape, type or layout.
        OverflowError
            A finite value is too large for the format.
        """
        ...

    def decode(self, payload: Bytes, values: Rows) -> None:
        """Overwrite the values, of shape (..., columns). Raises ValueError for a payload of the wrong size."""
        ...


@runtime_checkable
class DeltaCodec(RowCodec, Protocol):
    """A codec that can also send rows as differences to a message that both ends hold."""

    __slots__ = ()

    def encode_delta(
        self, values: Rows, message: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None
    ) -> None:
        """Encode values - message, and change the message as `decode_delta` does on the other end.

        The arguments and errors are those of `encode`. After an error the message is unchanged.
        """
        ...

    def decode_delta(self, payload: Bytes, message: Rows) -> None:
        """Change the message by the decoded payload. Raises ValueError for a payload of the wrong size."""
        ...


class AddingRows(DeltaCodec):
    """Base of codecs that decode, and add to a message, by one method; codes of whole values replace the message."""

    __slots__ = ()

    @override
    def decode(self, payload: Bytes, values: Rows) -> None:
        self._take("the values", payload, values, adding=False)

    @override
    def decode_delta(self, payload: Bytes, message: Rows) -> None:
        self._take("the message", payload, message, adding=True)

    def _take(self, name: str, payload: Bytes, rows: Rows, adding: bool) -> None:
        check_rows(name, rows)
        check_payload(self, payload, rows.shape)
        self._decode(payload, rows, adding)

    @abstractmethod
    def _decode(self, payload: Bytes, out: Rows, adding: bool) -> None:
        """Overwrite the rows with the decoded ones, or with `adding` add these."""


def check_rows(name: str, rows: AnyArray) -> None:
    """Raise ValueError unless these are contiguous float32 rows; `name` is theirs in the error."""
    if rows.dtype != np.float32 or not rows.flags.c_contiguous or rows.ndim < 1 or rows.shape[-1] < 1:
        raise ValueError(
            f"{name} must be C-contiguous float32 rows of one column or more, not {rows.dtype} of shape {rows.shape}: "
            f"pass np.ascontiguousarray(x, np.float32)"
        )


def check_pair(values: AnyArray, message: AnyArray) -> None:
    """Raise ValueError unless the values and their message are rows of one shape in memory of their own."""
    check_rows("the values", values)
    check_rows("the message", message)
    if values.shape != message.shape:
        raise ValueError(
            f"the values have shape {values.shape}, their message {message.shape}: pass the message of that example"
        )
    if np.may_share_memory(values, message):
        raise ValueError("the values and the message share memory: pass a copy of the values")


def check_payload(codec: RowCodec, payload: Bytes, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the payload has the size that rows of this shape need."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    expected = codec.nbytes(rows, columns)
    if payload.dtype != np.uint8 or payload.ndim != 1 or not payload.flags.c_contiguous or payload.size != expected:
        raise ValueError(
            f"{codec}: a payload of {rows} rows of {columns} has {expected} bytes of uint8, "
            f"this one {payload.size} of {payload.dtype}: it is damaged, or of rows of another shape"
        )
