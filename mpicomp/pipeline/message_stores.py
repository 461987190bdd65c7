"""Stores of messages: in memory, which is taken when a row is first written, and in a file of this rank's own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from collectives.annotations import Bytes, override
from mpicomp.codecs.options import whole
from mpicomp.codecs.rows.row_codec import RowCodec, Rows
from mpicomp.pipeline import store_states
from mpicomp.pipeline.store import Store
from mpicomp.pipeline.store_file import StoreFile
from mpicomp.pipeline.store_rows import Ids, Stamps, has_message, row_code, sum_codes
from mpicomp.pipeline.store_states import State
from mpicomp.pipeline.store_thread import StoreThread


class MessageStore(Store):
    """The last messages of examples, in memory.

    Parameters
    ----------
    examples, row_shape, variants, codec
        As of `Store`.
    most_bytes : int, optional
        The most bytes that all rows may take; None: the machine's memory. A larger store is refused at the start, not
        when memory has run out.

    Raises
    ------
    ValueError
        A parameter is out of range.
    MemoryError
        The rows would take more than `most_bytes`, or than the system gives.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.pipeline import MessageStore
    >>> with MessageStore(examples=4, row_shape=2) as store:
    ...     store.write([0, 3], np.ones((2, 2), np.float32))
    ...     store.forget([3])
    ...     store.read([0, 1]).tolist(), store.stamps([0, 1, 3]).tolist(), store.row_bytes
    ([[1.0, 1.0], [0.0, 0.0]], [1, 0, 0], 8)
    """

    kind = "memory"

    def __init__(
        self,
        examples: int,
        row_shape: int | tuple[int, ...],
        *,
        variants: int = 1,
        codec: RowCodec | None = None,
        most_bytes: int | None = None,
    ) -> None:
        super().__init__(examples, row_shape, variants=variants, codec=codec)
        if most_bytes is not None and not whole(most_bytes, 1):
            raise ValueError(f"most_bytes must be a number of bytes, or None, not {most_bytes!r:.80}")
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if most_bytes is None else most_bytes
        needed = self.rows * self.row_bytes
        refusal = (
            f"{self.rows} rows of {self.row_bytes} bytes take {needed} bytes: keep them in a file (FileMessageStore) "
            "or in fewer bits (codec=)"
        )
        if needed > most:
            raise MemoryError(f"{refusal}, or allow more than {most} bytes (most_bytes=) if few of them are visited")
        try:
            self._payload = np.zeros((self.rows, self.row_bytes), np.uint8)  # zero pages until they are written to
        except (MemoryError, ValueError):
            raise MemoryError(f"{refusal}; the system refuses that many") from None
        self._sum = self.pair = 0

    @override
    def touched_checksum(self) -> int:
        self._ready()
        return self._sum

    @override
    def reset_checksum(self) -> None:
        self._ready()
        self._sum = 0

    @override
    def state_dict(self) -> State:
        self._ready()
        ids = np.flatnonzero(has_message(self._ledger.marks))
        found = {"pair": self.pair, "stamps": self.all_stamps(), "ids": ids, "rows": self._payload[ids]}
        return {**self._description(), **found}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ready()
        marks = store_states.check(state, self._description(), self.rows, ("stamps", "ids", "rows"))
        ids, payload = np.asarray(state["ids"]), np.asarray(state["rows"])
        if not np.array_equal(ids, np.flatnonzero(has_message(marks))) or ids.dtype.kind not in "iu":
            raise ValueError("the state's ids are not those of its stamps: it is damaged, load an earlier one")
        if payload.dtype != np.uint8 or payload.shape != (ids.size, self.row_bytes):
            raise ValueError(
                f"the state's rows are {payload.dtype} of shape {payload.shape}, not uint8 of shape "
                f"{(ids.size, self.row_bytes)}: it is damaged, load an earlier one"
            )
        self._payload[ids] = payload
        self._ledger.marks[:] = marks
        self.pair = int(state.get("pair", 0))
        self._sum = 0

    @override
    def close(self) -> None:
        super().close()
        self._payload = np.zeros((0, self.row_bytes), np.uint8)

    @override
    def _load(self, rows: Ids, places: Ids, out: Rows) -> None:
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            self._format.decode(self._payload[row], out[place])

    @override
    def _keep(self, rows: Ids, payload: Bytes, stamps: Stamps) -> None:
        pairs = zip(rows.tolist(), stamps.tolist(), payload, strict=True)
        codes = [row_code(row, stamp, one) for row, stamp, one in pairs]
        self._payload[rows] = payload
        self._sum = (self._sum + sum_codes(rows, stamps, codes)) % 2**64


class FileMessageStore(Store):
    """The last messages of examples, in a file that outlives the process.

    The file is made if it is not there, and takes its room on the disk at once. A file of a process that was killed
    opens again: rows that it had not finished are forgotten, and listed in `torn`.

    Parameters
    ----------
    path : str or PathLike
        One per rank and cut, in a folder that exists; best on a disk of this machine.
    examples, row_shape, variants, codec
        As of `Store`.
    fingerprint : str
        Identifies this run and model, such as a hash of its options: a file of another one is refused.
    buffer_bytes : int
        The most bytes for rows that were read ahead, and again for those that wait to be written.

    Attributes
    ----------
    torn : int64[k]
        Rows that a process which was killed had not finished, when the file was opened.

    Raises
    ------
    ValueError
        A parameter is out of range, or the file is damaged, truncated, no store, or another run's.
    OSError
        The disk has too little room, another process has the file open, or the file cannot be made.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from mpicomp.pipeline import FileMessageStore
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "cut-0")
    ...     with FileMessageStore(file, examples=4, row_shape=2, fingerprint="run 1") as store:
    ...         store.write([3], np.ones((1, 2), np.float32))
    ...         store.flush()
    ...         state = store.state_dict()
    ...     with FileMessageStore(file, examples=4, row_shape=2, fingerprint="run 1") as store:
    ...         store.load_state_dict(state)
    ...         store.prefetch([3])
    ...         found = store.read([3]).tolist(), store.torn.tolist()
    >>> found
    ([[1.0, 1.0]], [])
    """

    kind = "file"

    def __init__(
        self,
        path: str | PathLike[str],
        examples: int,
        row_shape: int | tuple[int, ...],
        *,
        fingerprint: str,
        variants: int = 1,
        codec: RowCodec | None = None,
        buffer_bytes: int = 1 << 28,
    ) -> None:
        super().__init__(examples, row_shape, variants=variants, codec=codec)
        if not isinstance(fingerprint, str):
            raise ValueError(f"fingerprint must be a text, not {fingerprint!r:.80}")
        if not whole(buffer_bytes, 1):
            raise ValueError(f"buffer_bytes must be an integer of 1 or more, not {buffer_bytes!r:.80}")
        self._fingerprint = fingerprint
        self._file = StoreFile(path, self._description(), self.rows, self.row_bytes)
        self._ledger.marks[:] = self._file.marks[:, 0]
        self.torn = self._file.torn
        self._background = StoreThread(self._file, self.row_bytes, buffer_bytes)
        self._stop = weakref.finalize(self, self._background.stop, self._process)  # also when the program ends

    @override
    def prefetch(self, ids: ArrayLike) -> None:
        rows = self._check_ids(ids)
        self._background.read_ahead(rows[has_message(self._ledger.marks[rows])])

    @override
    def flush(self) -> None:
        self._ready()
        self._background.drain()
        self._file.sync()

    @override
    def close(self) -> None:
        super().close()
        self._stop()

    @override
    def touched_checksum(self) -> int:
        self._ready()
        self._background.drain()
        return self._background.sum

    @override
    def reset_checksum(self) -> None:
        self._ready()
        self._background.drain()
        self._background.sum = 0

    def state_dict(self) -> State:
        """Return the stamps of all rows, after `flush`. The rows are in the file, which belongs to the checkpoint.

        Raises
        ------
        OSError
            The disk fails.
        """
        self.flush()
        return {**self._description(), "pair": self.pair, "stamps": self.all_stamps()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a state is one of this store, and begin a new checksum. Rows and stamps remain those of the file.

        The file may be ahead of the state. `differing(state["stamps"], store.all_stamps())` are the rows that have
        changed since; whether they can be used depends on the other end's stamps. If another run has taken the file
        over since, all rows are forgotten.

        Parameters
        ----------
        state : dict

        Raises
        ------
        ValueError
            The state is of another store, or damaged.
        """
        self._ready()
        store_states.check(state, self._description(), self.rows, ("stamps",))
        if store_states.is_of_another_run(state.get("pair", self.pair), self.pair):
            self.forget_all()
        self.reset_checksum()

    @property
    def pair(self) -> int:
        """Number that the stores of both ends of a cut share; it is in the file."""
        return self._file.pair

    @pair.setter
    def pair(self, number: int) -> None:
        self._ready()
        self._background.drain()
        self._file.set_pair(number)

    @override
    def _description(self) -> State:
        return {**super()._description(), "fingerprint": self._fingerprint}

    @override
    def _load(self, rows: Ids, places: Ids, out: Rows) -> None:
        for place, payload in zip(places.tolist(), self._background.read_rows(rows), strict=True):
            self._format.decode(payload, out[place])

    @override
    def _keep(self, rows: Ids, payload: Bytes, stamps: Stamps) -> None:
        self._background.write_behind(rows, payload, stamps)

    @override
    def _store_forgotten(self, rows: Ids) -> None:
        self._background.drain()
        self._file.set_stamps(rows, self._ledger.marks[rows])
