"""Coding of rows in one direction of a cut: the interface, and codings of messages that stand for themselves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from collectives.annotations import Bytes, override
from mpicomp.codecs.base import Draw
from mpicomp.codecs.rows.row_codec import RowCodec, Rows
from mpicomp.kernels.streams import Stream
from mpicomp.pipeline.store_rows import Ids, Stamps
from mpicomp.pipeline.store_states import State

# Columns of a coded row of an image: a scale of 16 bits then takes half a bit for each element.
_LEAST_COLUMNS = 32


class Coding(ABC):
    """One direction of a cut, on one of its ends. Kept messages change at `commit` only."""

    # the abstract methods suffice where no messages are kept
    @abstractmethod
    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        """Return the size of a payload, which is equal on both ends."""

    @abstractmethod
    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        """Overwrite the payload. Raises ValueError for NaN and infinity, OverflowError for rows out of range."""

    @abstractmethod
    def decode(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        """Return the rows, equal on both ends, in memory of their own."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return the state for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Go on from a state. Raises ValueError, and changes nothing, if the state is of another coding."""

    @abstractmethod
    def commit(self) -> None:
        """End a step that succeeded. Raises OSError where messages cannot be written."""

    def roll_back(self) -> None:
        """End a step that failed on some stage."""
        return

    def check(self, ids: Ids | None) -> None:
        """Raise TypeError or ValueError unless a step of these examples can be coded."""
        return

    def prepare(self, row_shape: tuple[int, ...]) -> None:
        """Make room for messages of this shape. Raises ValueError, OSError or MemoryError."""
        return

    def prefetch(self, ids: Ids) -> None:
        """Announce the examples of a step to come."""
        return

    def pairing(self) -> Stamps | None:
        """Return the words that the other end needs for `settle`, equally many there; None: no messages are kept."""
        return None

    def settle(self, mine: Stamps, theirs: Stamps) -> int:
        """Forget the examples whose messages differ by the `pairing` of both ends; return their number."""
        return 0

    def forget_all(self) -> None:
        """Have all examples sent in full precision the next time."""
        return

    def begin_checksum(self) -> None:
        """Begin a new checksum, on both ends."""
        return

    def checksum(self) -> int | None:
        """Return a checksum of the messages kept since the last call, equal on both ends; None in most steps."""
        return None

    def digest(self) -> int:
        """Return 63 bits for all messages, equal on both ends; 0: there are no messages."""
        return 0

    def close(self) -> None:
        """Release the messages and their file."""
        return


@dataclass(frozen=True, slots=True)
class CodingPlace:
    """Place of a coding, which determines its random words."""

    direction: int  # number of the cut and direction: activations have even numbers
    end: str = ""  # "before" or "after" the cut
    part: int = 0  # number of the tensor among those that travel together
    seed: int = 0  # of stochastic rounding
    pipeline: int = 0  # number of the pipeline among those that run next to each other

    def stream(self, purpose: str) -> Stream:
        """Return the random words that both ends draw."""
        return Stream(self.seed, self.direction, f"{purpose} {self.part}" if self.part else purpose)


class DirectCoding(Coding):
    """One end of a cut whose messages stand for themselves."""

    def __init__(self, codec: RowCodec, stream: Stream, source: int = 0) -> None:
        self._codec, self._stream, self._source, self._step = codec, stream, source, 0

    @override
    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        rows, columns = coded_matrix(row_shape)
        return self._codec.nbytes(ids.size * rows, columns)

    @override
    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        values = as_matrix(rows)
        draw = Draw(self._stream, self._step, self._source)
        self._codec.encode(values, payload, draw, row_keys(ids, rows.shape[1:]))

    @override
    def decode(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        rows = np.empty((ids.size, *row_shape), np.float32)
        self._codec.decode(payload, as_matrix(rows))
        return rows

    @override
    def commit(self) -> None:
        self._step += 1

    @override
    def state_dict(self) -> State:
        return {"step": self._step}

    @override
    def load_state_dict(self, state: State) -> None:
        if set(state) != {"step"}:
            raise ValueError(f"a state with {', '.join(state)} is not one of Direct: load that of the same compression")
        self._step = int(state["step"])


def coded_matrix(row_shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of rows of an example that travel with a scale of their own, and their length."""
    columns = row_shape[-1] if row_shape else 1
    # A row is the last dimension, such as a token. That of images may be so short that the scale takes as much as the
    # codes, so their rows take in further dimensions.
    for length in reversed(row_shape[:-1] if len(row_shape) > 2 else ()):
        if columns >= _LEAST_COLUMNS:
            break
        columns *= length
    return math.prod(row_shape) // max(columns, 1), columns


def as_matrix(rows: Rows) -> Rows:
    """Return a view of examples as rows with a scale of their own."""
    count, columns = coded_matrix(rows.shape[1:])
    return rows.reshape(len(rows) * count, columns)


def row_keys(ids: Ids, row_shape: tuple[int, ...]) -> Ids:
    """Return a number for each row of these examples that is the same in every batch."""
    rows, _ = coded_matrix(row_shape)
    return (ids[:, None] * rows + np.arange(rows)).reshape(-1)
