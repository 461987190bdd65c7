"""Coding of messages as differences to the last ones of their examples, which both ends of a cut keep."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives.annotations import Bytes, override
from mpicomp.codecs.base import Draw
from mpicomp.codecs.rows.row_codec import DeltaCodec, Rows
from mpicomp.kernels.streams import Stream
from mpicomp.pipeline.coding import Coding, as_matrix, coded_matrix, row_keys
from mpicomp.pipeline.store import Store
from mpicomp.pipeline.store_rows import Ids, Stamps, differing, has_message
from mpicomp.pipeline.store_states import State, next_pair

MakeStore: TypeAlias = Callable[[tuple[int, ...], bool], Store]
_READ_TOGETHER = 64
_NUMBER_WORDS = 4  # of the two numbers before the stamps in `pairing`


class DeltaCoding(Coding):
    """One end of a cut that keeps the last message of every example."""

    def __init__(
        self, codec: DeltaCodec, examples: int, check_every: int, stream: Stream, make_store: MakeStore, source: int
    ) -> None:
        self._codec, self._examples, self._check_every = codec, examples, check_every
        # a store for messages of a shape, which is known when the first one passes; True: a state is about to be loaded
        # `source` is the number of the pipeline, each of which draws random words of its own
        self._stream, self._make_store, self._source = stream, make_store, source
        self._store: Store | None = None
        self._pending: list[tuple[Ids, Rows]] = []
        # the ends may have loaded states of different steps, and compare their messages after the same ones
        self._steps = self._steps_compared = 0

    @override
    def check(self, ids: Ids | None) -> None:
        if ids is None:
            raise TypeError("Deltas keeps a message for each example: pass ids= to step on every stage")
        outside = ids[(ids < 0) | (ids >= self._examples)]
        if outside.size:
            raise ValueError(f"id {outside[0]} is not one of {self._examples} examples: see Deltas(examples=)")
        once, counts = np.unique(ids, return_counts=True)
        if once.size < ids.size:
            raise ValueError(
                f"id {once[counts.argmax()]} occurs {counts.max()} times in a batch: leave repeated examples out, or "
                "give each augmented variant an id of its own"
            )

    @override
    def prepare(self, row_shape: tuple[int, ...]) -> None:
        self._open_store(row_shape)

    @override
    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        full = self._full(ids, row_shape)
        rows, columns = coded_matrix(row_shape)
        new = int(full.sum())
        return 4 * new * rows * columns + self._codec.nbytes((ids.size - new) * rows, columns)

    @override
    def prefetch(self, ids: Ids) -> None:
        if self._store is not None:
            self._store.prefetch(ids)

    @override
    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        row_shape = rows.shape[1:]
        full = self._full(ids, row_shape)
        first, rest = self._parts(payload, full, row_shape)
        if full.any():
            new = rows[full]  # a copy, which is kept
            if not np.isfinite(new).all():
                raise ValueError("activations contain NaN or infinity")
            first[:] = new
            self._encode_differences(rows[~full], ids[~full], rest)
            self._pending.append((ids[full], new))
        else:
            self._encode_differences(rows, ids, rest)

    def _encode_differences(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        if not ids.size:
            return
        messages = self._open_store(rows.shape[1:]).read(ids)
        draw, numbers = Draw(self._stream, self._steps, self._source), row_keys(ids, rows.shape[1:])
        self._codec.encode_delta(as_matrix(rows), as_matrix(messages), payload, draw, numbers)
        self._pending.append((ids, messages))

    @override
    def decode(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        full = self._full(ids, row_shape)
        first, rest = self._parts(payload, full, row_shape)
        if not full.any():
            return self._decode_differences(rest, ids, row_shape).copy()  # the caller must not change a kept message
        rows = np.empty((ids.size, *row_shape), np.float32)
        rows[full] = first
        if not full.all():
            rows[~full] = self._decode_differences(rest, ids[~full], row_shape)
        self._pending.append((ids[full], first.copy()))
        return rows

    def _decode_differences(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        messages = self._open_store(row_shape).read(ids)
        self._codec.decode_delta(payload, as_matrix(messages))
        self._pending.append((ids, messages))
        return messages

    @override
    def commit(self) -> None:
        pending, self._pending = self._pending, []
        self._steps += 1
        self._steps_compared += 1  # first: it stays equal on both ends also where a write fails
        for ids, rows in pending:
            if ids.size:
                self._open_store(rows.shape[1:]).write(ids, rows)

    @override
    def roll_back(self) -> None:
        self._pending.clear()

    @override
    def state_dict(self) -> State:
        if self._store is None:
            return {"steps": self._steps, "row_shape": None, "store": None}
        return {"steps": self._steps, "row_shape": list(self._store.row_shape), "store": self._store.state_dict()}

    @override
    def load_state_dict(self, state: State) -> None:
        if set(state) != {"steps", "row_shape", "store"}:
            raise ValueError(f"a state with {', '.join(state)} is not one of Deltas: load that of the same compression")
        if state["store"] is not None:
            self._open_store(tuple(state["row_shape"]), resuming=True).load_state_dict(state["store"])
        elif self._store is not None:
            self._store.forget_all()
        self._steps = int(state["steps"])

    @override
    def pairing(self) -> Stamps | None:
        # The store's number, a random one to replace it, and the stamps of all examples.
        store = self._store
        numbers = np.array([0 if store is None else store.pair, 1 + secrets.randbits(62)], np.uint64)
        stamps = np.zeros(self._examples, np.uint32) if store is None else store.all_stamps()
        return np.concatenate([numbers.view(np.uint32), stamps])

    @override
    def settle(self, mine: Stamps, theirs: Stamps) -> int:
        (my_pair, my_offer), (their_pair, their_offer) = (one[:_NUMBER_WORDS].view(np.uint64) for one in (mine, theirs))
        my_stamps, their_stamps = mine[_NUMBER_WORDS:], theirs[_NUMBER_WORDS:]
        rows = differing(my_stamps, their_stamps)
        if my_pair != their_pair:  # equal stamps may stand for messages of two runs
            rows = np.union1d(rows, np.flatnonzero(has_message(my_stamps) | has_message(their_stamps)))
        if self._store is not None:
            self._store.forget(rows, their_stamps[rows])
            offer = int(max(my_offer, their_offer))
            # also of ends that share their messages: from copies of their files several runs may continue
            self._store.pair = next_pair(int(my_pair), offer) if my_pair == their_pair else offer
        return rows.size

    @override
    def forget_all(self) -> None:
        if self._store is not None:
            self._store.forget_all()

    @override
    def begin_checksum(self) -> None:
        self._steps_compared = 0
        if self._store is not None:
            self._store.reset_checksum()

    @override
    def checksum(self) -> int | None:
        if self._store is None or self._steps_compared % self._check_every:
            return None
        found = self._store.touched_checksum()
        self._store.reset_checksum()
        return found

    @override
    def digest(self) -> int:
        if self._store is None:
            return 0
        stamps = self._store.all_stamps()
        found = hashlib.blake2b(stamps.tobytes(), digest_size=8)
        for ids in np.array_split(np.flatnonzero(has_message(stamps)), -(-stamps.size // _READ_TOGETHER)):
            found.update(self._store.read(ids).tobytes())
        return int.from_bytes(found.digest(), "little") >> 1

    @override
    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _full(self, ids: Ids, row_shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return which of the examples travel in full precision."""
        full: NDArray[np.bool_] = self._open_store(row_shape).stamps(ids) == 0
        return full

    def _parts(self, payload: Bytes, full: NDArray[np.bool_], row_shape: tuple[int, ...]) -> tuple[Rows, Bytes]:
        """Return the parts of a payload: rows in full precision, and coded differences."""
        count = int(full.sum())
        split = 4 * count * prod(row_shape)
        return payload[:split].view(np.float32).reshape(count, *row_shape), payload[split:]

    def _open_store(self, row_shape: tuple[int, ...], resuming: bool = False) -> Store:
        if self._store is not None and self._store.row_shape != row_shape:
            raise ValueError(
                f"the messages kept have shape {[*self._store.row_shape]}, and an example's is now {[*row_shape]}: "
                "load the state of this model, or make a new stage"
            )
        if self._store is None:
            self._store = self._make_store(row_shape, resuming)
        return self._store
