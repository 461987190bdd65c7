"""Stores of the last message of every example, to which AQ-SGD sends differences; both ends of a cut have one.

    first visit:  the message itself is sent; both ends write it
    later:        both ends read m, the difference d is sent, both write m + d

Both ends call the same methods with the same ids in the same order. `touched_checksum` shows cheaply that they have
kept the same, and `all_stamps` with `differing` which rows they cannot go on from after a crash.

`MessageStore` is in memory, `FileMessageStore` in a file per rank. Ids outside of the store, and ids that occur twice
in a micro-batch, are refused, since the ends could keep different messages of theirs.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from collectives.annotations import Bytes
from mpicomp.codecs.rows.row_codec import RowCodec, Rows
from mpicomp.pipeline.store_rows import Ids, Ledger, RowFormat, Stamps, has_message
from mpicomp.pipeline.store_states import State


class Store(ABC):
    """Base of stores; one thread of one process uses a store.

    All methods raise ValueError for ids that are out of range, are no integers, or occur twice, and RuntimeError once
    the store is closed, or in a process that was forked from its own.

    Parameters
    ----------
    examples : int
        Ids are 0 to examples - 1.
    row_shape : int or tuple of int
        Shape of an example's message, such as (tokens, width).
    variants : int
        Rows per example: one for each way in which augmentation changes it, such as 2 for flips. `row_ids` makes the
        ids of variants, and all other methods take these.
    codec : RowCodec, optional
        Keeps rows in fewer bits, such as ``RowQuantizer(bits=8)``; None: float32. Both ends need the same.

    Attributes
    ----------
    pair : int
        Number that the stores of both ends of a cut share, which the ends agree on; 0: none yet. Stamps of stores with
        different numbers cannot be compared. The upper 32 bits are the run's; the lower ones change whenever the ends
        settle which messages they share.

    Raises
    ------
    ValueError
        A parameter is out of range.

    Examples
    --------
    Both ends of a cut keep the same messages:

    >>> import numpy as np
    >>> from mpicomp.pipeline import MessageStore, differing
    >>> sender, receiver = stores = [MessageStore(examples=4, row_shape=2, variants=2) for end in range(2)]
    >>> for store in stores:
    ...     store.write(store.row_ids([0, 3], variants=[1, 0]), np.ones((2, 2), np.float32))
    >>> sender.touched_checksum() == receiver.touched_checksum(), sender.rows, sender.row_shape
    (True, 8, (2,))
    >>> receiver.forget_all()  # such as after a crash
    >>> lost = differing(sender.all_stamps(), receiver.all_stamps())
    >>> sender.forget(lost, receiver.all_stamps()[lost])
    >>> sender.stamps(lost).tolist()
    [0, 0]
    >>> for store in stores:
    ...     store.reset_checksum()
    ...     store.load_state_dict(store.state_dict())
    ...     store.close()
    """

    kind = ""
    pair: int

    def __init__(
        self, examples: int, row_shape: int | tuple[int, ...], *, variants: int = 1, codec: RowCodec | None = None
    ) -> None:
        self._format = RowFormat(row_shape, codec)
        self._ledger = Ledger(examples, variants)
        self._process, self._closed = os.getpid(), False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of an example's message."""
        return self._format.row_shape

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes."""
        return self._format.nbytes

    @property
    def rows(self) -> int:
        """Number of rows: examples times variants."""
        return self._ledger.marks.size

    def row_ids(self, ids: ArrayLike, variants: ArrayLike) -> Ids:
        """Return the ids of examples' variants: id * variants + variant.

        Parameters
        ----------
        ids : int[k]
            Examples.
        variants : int or int[k]
            Number of the example's variant.

        Returns
        -------
        int64[k]
        """
        return self._ledger.row_ids(ids, variants)

    def stamps(self, ids: ArrayLike) -> Stamps:
        """Return the visits of the rows `ids`, uint32[k]; 0: there is no message, the next one is sent in full."""
        return self._ledger.stamps(self._check_ids(ids))

    def all_stamps(self) -> Stamps:
        """Return a copy of the stamps of all rows, for `differing`, with the highest bit set in forgotten rows."""
        self._ready()
        return self._ledger.marks.copy()

    def read(self, ids: ArrayLike, out: Rows | None = None) -> Rows:
        """Copy rows.

        Parameters
        ----------
        ids : int[k]
        out : float32[k, *row_shape], optional
            Contiguous; overwritten and returned.

        Returns
        -------
        float32[k, *row_shape]
            Zeros where there is no message.

        Raises
        ------
        ValueError
            `out` does not fit.
        """
        rows = self._check_ids(ids)
        shape = (rows.size, *self.row_shape)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out is {out.dtype} of shape {out.shape}: pass contiguous float32 of shape {shape}")
        there = has_message(self._ledger.marks[rows])
        out[~there] = 0
        self._load(rows[there], np.flatnonzero(there), out.reshape(rows.size, math.prod(self.row_shape)))
        return out

    def write(self, ids: ArrayLike, rows: ArrayLike, stamps: ArrayLike | None = None) -> None:
        """Keep copies of rows, and count the visit.

        Parameters
        ----------
        ids : int[k]
        rows : float32[k, *row_shape]
        stamps : int or int[k], optional
            The rows' new stamps; None: one more than before.

        Raises
        ------
        ValueError
            Rows or stamps do not fit. No row is kept then, nor where an id is refused.
        """
        places = self._check_ids(ids)
        following = self._ledger.following(places, stamps)
        payload = self._format.encode(rows, places.size)
        self._keep(places, payload, following)
        self._ledger.marks[places] = following

    def forget(self, ids: ArrayLike, stamps: ArrayLike | None = None) -> None:
        """Forget rows' messages, so that the next ones are sent in full precision; their count of visits goes on.

        Parameters
        ----------
        ids : int[k]
        stamps : uint32[k], optional
            The other end's stamps of these rows: the higher count is kept, so that both ends' are equal afterwards.
        """
        rows = self._check_ids(ids)
        self._ledger.forget(rows, stamps)
        self._store_forgotten(rows)

    def forget_all(self) -> None:
        """Forget the messages of all rows."""
        self.forget(np.flatnonzero(has_message(self.all_stamps())))

    def prefetch(self, ids: ArrayLike) -> None:
        """Announce rows that will be read soon; in a file's store a thread reads them ahead, up to `buffer_bytes`.

        Parameters
        ----------
        ids : int[k]

        Raises
        ------
        OSError
            In a file's store: the thread could not write.
        """
        self._check_ids(ids)

    @abstractmethod
    def touched_checksum(self) -> int:
        """Return one number of 64 bits for all writes since the last `reset_checksum`, or since the store was opened.

        It depends on ids, stamps and bytes of the rows, and not on the order of writes: equal on both ends of a cut if
        they kept the same. Two rows that differ are taken for equal once in 2^32 times. In a file's store it waits
        until all written rows are in the file, not for the disk.
        """

    @abstractmethod
    def reset_checksum(self) -> None:
        """Begin a new sum of writes."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return the state for a checkpoint: arrays, numbers and texts."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, with a new checksum.

        Parameters
        ----------
        state : dict

        Raises
        ------
        ValueError
            The state is of another store, or damaged. The store is unchanged then.
        """

    def flush(self) -> None:
        """Wait until all written rows are on the disk; no-op in memory. Raises OSError if the disk fails."""
        self._ready()

    def close(self) -> None:
        """Flush, and release memory, file and thread; in a forked process these remain the parent's.

        The store cannot be used afterwards.

        Raises
        ------
        OSError
            A row could not be written. The file is closed nevertheless.
        """
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _load(self, rows: Ids, places: Ids, out: Rows) -> None:
        """Write rows that have a message to these places of `out`, a matrix with a message in each row."""

    @abstractmethod
    def _keep(self, rows: Ids, payload: Bytes, stamps: Stamps) -> None:
        """Take over the bytes of rows; the array is the store's."""

    def _store_forgotten(self, rows: Ids) -> None:
        """Have a store that opens after a crash know the forgotten rows."""
        return

    def _check_ids(self, ids: ArrayLike) -> Ids:
        self._ready()
        return self._ledger.check(ids)

    def _ready(self) -> None:
        if self._closed:
            raise RuntimeError("the store is closed: open it again")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the store belongs to process {self._process}, and this is process {os.getpid()}, which was forked "
                "from it: make a store of its own here, or use it there"
            )

    def _description(self) -> State:
        """Return the properties that stores must have in common to take over each other's rows."""
        return {
            "store": self.kind,
            "examples": self._ledger.examples,
            "variants": self._ledger.variants,
            "row_shape": list(self.row_shape),
            "format": self._format.name,
        }
