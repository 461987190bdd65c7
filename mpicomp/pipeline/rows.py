"""Examples as rows, which is what codecs take, and how a store keeps an example's: as float32, or in fewer bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes
from mpicomp.codecs.options import whole
from mpicomp.codecs.rows.row_codec import RowCodec, Rows

Ids = NDArray[np.int64]
_LEAST_COLUMNS = 32  # of a coded image's row: a scale of 16 bits then takes half a bit for each element


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The bytes of one example's message.

    Attributes
    ----------
    row_shape : tuple of int
        Of a message, such as (tokens, width); the last is what a codec calls columns.
    codec : RowCodec, optional
        None: float32. One that rounds at random is refused: both ends of a cut must keep the same rows.
    """

    row_shape: tuple[int, ...]
    codec: RowCodec | None = None

    def __post_init__(self) -> None:
        given: Any = self.row_shape
        shape = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not all(whole(length, 1) for length in shape):
            raise ValueError(f"row_shape must be integers of 1 or more, such as (tokens, width), not {given!r:.80}")
        object.__setattr__(self, "row_shape", tuple(map(int, shape)))
        if getattr(self.codec, "rounding", "nearest") != "nearest":
            raise ValueError(f"{self.codec!r:.200} rounds at random: a store takes codecs with rounding='nearest'")

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of a message, as a codec sees it."""
        return matrix(self.row_shape)

    @property
    def nbytes(self) -> int:
        """Of a message."""
        return 4 * math.prod(self.row_shape) if self.codec is None else self.codec.nbytes(*self.matrix)

    @property
    def name(self) -> str:
        """What must be equal on both ends of a cut, and in a file and the program that opens it."""
        return "float32" if self.codec is None else repr(self.codec)

    def encode(self, rows: Any, count: int) -> NDArray[np.uint8]:
        """Return a copy of `count` messages as bytes, uint8[count, nbytes].

        Raises
        ------
        ValueError
            The messages have another shape or type, or the codec has no code for them.
        """
        found = np.asarray(rows)
        if found.dtype != np.float32 or found.shape != (count, *self.row_shape):
            raise ValueError(
                f"rows of shape {found.shape} and type {found.dtype} are no messages of {count} examples: pass "
                f"float32 of shape {(count, *self.row_shape)}"
            )
        payload = np.empty((count, self.nbytes), np.uint8)
        if self.codec is None:
            payload.view(np.float32).reshape(found.shape)[...] = found
            return payload
        for one, bytes_of_one in zip(np.ascontiguousarray(found), payload, strict=True):
            self.codec.encode(one.reshape(self.matrix), bytes_of_one, None)
        return payload

    def decode(self, payload: Bytes, out: Rows) -> None:
        """Overwrite one message, as a contiguous vector, with what bytes stand for."""
        if self.codec is None:
            out.view(np.uint8)[:] = payload
        else:
            self.codec.decode(payload, out.reshape(self.matrix))


def matrix(row_shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows of a message in a store, and their length: the last dimension."""
    return (math.prod(row_shape[:-1]), row_shape[-1]) if row_shape else (1, 1)


def coded_matrix(row_shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows of an example that travel with a scale of their own, and their length.

    A row is the last dimension, such as a token. Examples of three dimensions or more are images, whose last one may be
    so short that the scale takes as much as the codes. Their rows have further dimensions, until they are long enough.
    """
    columns = row_shape[-1] if row_shape else 1
    for length in reversed(row_shape[:-1] if len(row_shape) > 2 else ()):
        if columns >= _LEAST_COLUMNS:
            break
        columns *= length
    return math.prod(row_shape) // max(columns, 1), columns


def as_matrix(rows: Rows) -> Rows:
    """Examples as rows with a scale of their own; a view."""
    count, columns = coded_matrix(rows.shape[1:])
    return rows.reshape(len(rows) * count, columns)


def row_keys(ids: Ids, row_shape: tuple[int, ...]) -> Ids:
    """A number for each row of these examples, whatever batch they are in."""
    rows, _ = coded_matrix(row_shape)
    return (ids[:, None] * rows + np.arange(rows)).reshape(-1)
