"""How rows travel between two stages: as they are, or as differences to the last message of the same example.

AQ-SGD (Wang et al., "Fine-tuning language models over slow networks using activation quantization with guarantees",
NeurIPS 2022). Both ends of a cut keep the last message m of every example, with activations a::

    first visit:  a travels in full precision;       both set m <- a
    later:        d = Q(a - m) travels;              both set m <- m + d
                  the next stage runs on m

`Direct` sends Q(a) each time, which is what the paper calls DirectQ; gradients of activations travel like that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Draw
from mpicomp.codecs.rows import RowQuantizer
from mpicomp.codecs.rows_full import FullRows
from mpicomp.kernels.streams import Stream
from mpicomp.pipeline.file_store import FileMessageStore
from mpicomp.pipeline.memory_store import MessageStore
from mpicomp.pipeline.stamps import Stamps
from mpicomp.pipeline.store import Store

Bytes = NDArray[np.uint8]
Rows = NDArray[np.float32]
Ids = NDArray[np.int64]
Codec = FullRows | RowQuantizer


class Coding(Protocol):
    """One direction of a cut, on one of its ends; what is kept changes at `commit`, never before."""

    def check(self, ids: Ids | None, parts: int) -> None:
        """Raise TypeError or ValueError unless a step of these examples, in so many parts, can be coded."""
        ...

    def prepare(self, row_shape: tuple[int, ...]) -> None:
        """Make room for what is kept of rows of this shape; raises ValueError, OSError or MemoryError."""
        ...

    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        """Of a payload: equal on both ends."""
        ...

    def prefetch(self, ids: Ids) -> None:
        """These examples are the next."""
        ...

    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        """Overwrite the payload. Raises ValueError for NaN and infinity, OverflowError for rows out of range."""
        ...

    def decode(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        """What the rows are on both ends, in memory of their own."""
        ...

    def commit(self) -> None:
        """The step has ended well; raises OSError where what is to be kept cannot be written."""
        ...

    def roll_back(self) -> None:
        """The step has failed on some stage."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; ValueError, and nothing has changed, if it is of something else."""
        ...

    def stamps(self) -> Stamps | None:
        """Visits of all examples; None: nothing is kept of them."""
        ...

    def forget(self, ids: Ids, theirs: Stamps) -> None:
        """Have these examples sent in full precision the next time; `theirs` are the other end's stamps of them."""
        ...

    def checksum(self) -> int | None:
        """Of what was kept since the last call, equal on both ends; None: it is not time for one."""
        ...


class Compression(Protocol):
    """Options of one direction, the same on all stages."""

    def start(self, seed: int, cut: int, end: str) -> Coding:
        """One end of a cut, "before" or "after" it."""
        ...


@dataclass(frozen=True)
class Direct:
    """Each message by itself.

    Parameters
    ----------
    codec : Codec
        ``FullRows()``: float32; ``FullRows("float16")``; ``RowQuantizer(bits=4)``: DirectQ.
    """

    codec: Codec = field(default_factory=FullRows)

    def start(self, seed: int, cut: int, end: str) -> DirectCoding:
        """See `Compression`."""
        return DirectCoding(self.codec, Stream(seed, cut, "direct rows"))


@dataclass(frozen=True)
class Deltas:
    """Differences to the example's last message: AQ-SGD.

    Parameters
    ----------
    codec : Codec
        Of the differences, such as ``RowQuantizer(bits=3)``.
    examples : int
        The ids given to `PipelineStage.step` are 0 to examples - 1. Augmented examples need an id for each variant,
        such as ``2 * id + flipped``.
    folder : str or Path, optional
        Keep messages in files there, one for each end of a cut, and not in memory; the same on all stages.
    run : str
        What stands for this run and model: a file of another one is refused.
    stored : Codec, optional
        Keep messages in fewer bits; None: float32.
    check_every : int
        Steps between two comparisons of what the two ends of a cut have kept.
    """

    codec: Codec
    examples: int
    folder: str | Path | None = None
    run: str = ""
    stored: Codec | None = None
    check_every: int = 100

    def __post_init__(self) -> None:
        for name in ("examples", "check_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r:.80}")

    def start(self, seed: int, cut: int, end: str) -> DeltaCoding:
        """See `Compression`."""
        return DeltaCoding(self, Stream(seed, cut, "row differences"), f"cut-{cut}-{end}")


class DirectCoding:
    """One end of a cut whose messages stand for themselves."""

    def __init__(self, codec: Codec, stream: Stream) -> None:
        self._codec, self._stream, self._step = codec, stream, 0

    def check(self, ids: Ids | None, parts: int) -> None:
        """See `Coding`."""

    def prepare(self, row_shape: tuple[int, ...]) -> None:
        """See `Coding`."""

    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        """See `Coding`."""
        rows, columns = matrix(row_shape)
        return self._codec.nbytes(ids.size * rows, columns)

    def prefetch(self, ids: Ids) -> None:
        """See `Coding`."""

    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        """See `Coding`."""
        values = as_matrix(rows)
        self._codec.encode(values, payload, Draw(self._stream, self._step, 0), row_keys(ids, rows.shape[1:]))

    def decode(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        """See `Coding`."""
        rows = np.empty((ids.size, *row_shape), np.float32)
        self._codec.decode(payload, as_matrix(rows))
        return rows

    def commit(self) -> None:
        """See `Coding`."""
        self._step += 1

    def roll_back(self) -> None:
        """See `Coding`."""

    def state_dict(self) -> dict[str, Any]:
        """See `Coding`."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Coding`."""
        if set(state) != {"step"}:
            raise ValueError(f"a state with {', '.join(state)} is not one of Direct: load that of the same compression")
        self._step = int(state["step"])

    def stamps(self) -> Stamps | None:
        """See `Coding`."""
        return None

    def forget(self, ids: Ids, theirs: Stamps) -> None:
        """See `Coding`."""

    def checksum(self) -> int | None:
        """See `Coding`."""
        return None


class DeltaCoding:
    """One end of a cut that keeps the last message of every example."""

    def __init__(self, options: Deltas, stream: Stream, name: str) -> None:
        self._options, self._stream, self._name = options, stream, name
        self._store: Store | None = None  # made when the shape of a message is known
        self._pending: list[tuple[Ids, Rows]] = []
        self._steps = 0

    def check(self, ids: Ids | None, parts: int) -> None:
        """See `Coding`."""
        if ids is None:
            raise TypeError("Deltas keeps a message for each example: pass ids= to step on every stage")
        outside = ids[(ids < 0) | (ids >= self._options.examples)]
        if outside.size:
            raise ValueError(f"id {outside[0]} is not one of {self._options.examples} examples: see Deltas(examples=)")
        once, counts = np.unique(ids, return_counts=True)
        if once.size < ids.size:
            raise ValueError(
                f"id {once[counts.argmax()]} occurs {counts.max()} times in a batch: leave repeated examples out, or "
                "give each augmented variant an id of its own"
            )

    def prepare(self, row_shape: tuple[int, ...]) -> None:
        """See `Coding`."""
        self._opened(row_shape)

    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        """See `Coding`."""
        full = self._full(ids, row_shape)
        rows, columns = matrix(row_shape)
        new = int(full.sum())
        return 4 * new * rows * columns + self._options.codec.nbytes((ids.size - new) * rows, columns)

    def prefetch(self, ids: Ids) -> None:
        """See `Coding`."""
        if self._store is not None:
            self._store.prefetch(ids)

    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        """See `Coding`."""
        row_shape = rows.shape[1:]
        full = self._full(ids, row_shape)
        first, rest = self._parts(payload, full, row_shape)
        if not np.isfinite(rows[full]).all():
            raise ValueError("activations contain NaN or infinity")
        first[:] = rows[full]
        if not full.all():
            later, messages = ids[~full], self._opened(row_shape).read(ids[~full])
            draw, numbers = Draw(self._stream, self._steps, 0), row_keys(later, row_shape)
            self._options.codec.encode_delta(as_matrix(rows[~full]), as_matrix(messages), rest, draw, numbers)
            self._pending.append((later, messages))
        self._pending.append((ids[full], first.copy()))

    def decode(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        """See `Coding`."""
        full = self._full(ids, row_shape)
        first, rest = self._parts(payload, full, row_shape)
        rows = np.empty((ids.size, *row_shape), np.float32)
        rows[full] = first
        if not full.all():
            messages = self._opened(row_shape).read(ids[~full])
            self._options.codec.decode_delta(rest, as_matrix(messages))
            rows[~full] = messages
            self._pending.append((ids[~full], messages))
        self._pending.append((ids[full], first.copy()))
        return rows

    def commit(self) -> None:
        """See `Coding`."""
        pending, self._pending = self._pending, []
        for ids, rows in pending:
            if ids.size:
                self._opened(rows.shape[1:]).write(ids, rows)
        self._steps += 1

    def roll_back(self) -> None:
        """See `Coding`."""
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Coding`."""
        if self._store is None:
            return {"steps": self._steps, "row_shape": None, "store": None}
        return {"steps": self._steps, "row_shape": list(self._store.row_shape), "store": self._store.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Coding`."""
        if set(state) != {"steps", "row_shape", "store"}:
            raise ValueError(f"a state with {', '.join(state)} is not one of Deltas: load that of the same compression")
        if state["store"] is not None:
            self._opened(tuple(state["row_shape"])).load_state_dict(state["store"])
        elif self._store is not None:
            stamps = self._store.all_stamps()
            self._store.forget(np.flatnonzero(stamps), None)
        self._steps = int(state["steps"])

    def stamps(self) -> Stamps | None:
        """See `Coding`."""
        return np.zeros(self._options.examples, np.uint32) if self._store is None else self._store.all_stamps()

    def forget(self, ids: Ids, theirs: Stamps) -> None:
        """See `Coding`."""
        if self._store is not None:
            self._store.forget(ids, theirs)

    def checksum(self) -> int | None:
        """See `Coding`."""
        if self._store is None or self._steps % self._options.check_every:
            return None
        found = self._store.touched_checksum()
        self._store.reset_checksum()
        return found

    def _full(self, ids: Ids, row_shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Which of the examples travel in full precision."""
        full: NDArray[np.bool_] = self._opened(row_shape).stamps(ids) == 0
        return full

    def _parts(self, payload: Bytes, full: NDArray[np.bool_], row_shape: tuple[int, ...]) -> tuple[Rows, Bytes]:
        count = int(full.sum())
        split = 4 * count * prod(row_shape)
        return payload[:split].view(np.float32).reshape(count, *row_shape), payload[split:]

    def _opened(self, row_shape: tuple[int, ...]) -> Store:
        if self._store is not None and self._store.row_shape != row_shape:
            raise ValueError(
                f"the messages kept have shape {[*self._store.row_shape]}, and an example's is now {[*row_shape]}: "
                "load the state of this model, or make a new stage"
            )
        if self._store is None:
            options = self._options
            if options.folder is None:
                self._store = MessageStore(options.examples, row_shape, codec=options.stored)
            else:
                path = Path(options.folder) / self._name
                self._store = FileMessageStore(
                    path, options.examples, row_shape, codec=options.stored, fingerprint=options.run
                )
        return self._store


def row_keys(ids: Ids, row_shape: tuple[int, ...]) -> NDArray[np.int64]:
    """A number for each row of these examples, whatever batch they are in."""
    rows, _ = matrix(row_shape)
    return (ids[:, None] * rows + np.arange(rows)).reshape(-1)


def matrix(row_shape: tuple[int, ...]) -> tuple[int, int]:
    """How many rows with a scale of their own an example has, and their length: the last dimension."""
    return (prod(row_shape[:-1]), row_shape[-1]) if row_shape else (1, 1)


def as_matrix(rows: Rows) -> Rows:
    """Examples as rows with a scale of their own; a view."""
    count, columns = matrix(rows.shape[1:])
    return rows.reshape(len(rows) * count, columns)
