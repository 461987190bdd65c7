"""A store in a file of this rank's own, read ahead and written back by a thread."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any

from mpicomp.codecs.options import whole
from mpicomp.codecs.rows.row_codec import RowCodec, Rows
from mpicomp.pipeline.prefetch import Prefetcher
from mpicomp.pipeline.stamps import Ids, Stamps, seen
from mpicomp.pipeline.store import State, Store
from mpicomp.pipeline.store_file import StoreFile


class FileMessageStore(Store):
    """The last messages of examples, in a file that outlives the process.

    The file is made if it is not there, and takes its room on the disk at once. A file of a process that was killed
    opens again: rows that it had not finished are forgotten, as `torn` tells.

    Parameters
    ----------
    path
        One per rank and cut, in a folder that exists; best on a disk of this machine.
    examples, row_shape, variants, codec
        As of `Store`.
    fingerprint : str
        What stands for this run and model, such as a hash of its options: a file of another one is refused.
    buffer_bytes : int
        The most that rows which were read ahead may take in memory, and again those that wait to be written.

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
    """

    kind = "file"

    def __init__(
        self,
        path: str | PathLike[str],
        examples: int,
        row_shape: Any,
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
        self._behind = Prefetcher(self._file, self.row_bytes, buffer_bytes)
        self._stop = weakref.finalize(self, self._behind.stop, self._process)  # also when the program ends

    def prefetch(self, ids: Any) -> None:
        """Read rows of the next micro-batches ahead; more than `buffer_bytes` of them are not.

        Raises
        ------
        ValueError
            An id is out of range, no integer, or occurs twice.
        OSError
            The thread could not write.
        """
        rows = self._rows(ids)
        self._behind.ahead(rows[seen(self._ledger.marks[rows])])

    def flush(self) -> None:
        """Wait until all that was written has reached the disk.

        Raises
        ------
        OSError
            The disk fails.
        """
        self._ready()
        self._behind.drain()
        self._file.sync()

    def close(self) -> None:
        """Flush, end the thread and close the file. A forked process leaves them alone.

        Raises
        ------
        OSError
            Something could not be written. The file is closed nevertheless.
        """
        super().close()
        self._stop()

    def touched_checksum(self) -> int:
        """See `Store.touched_checksum`; waits until all that was written is in the file, not for the disk."""
        self._ready()
        return self._behind.checksum()

    def reset_checksum(self) -> None:
        """See `Store.reset_checksum`."""
        self._ready()
        self._behind.reset_checksum()

    def state_dict(self) -> State:
        """Flush, and return the stamps of all rows. The rows are in the file, which belongs to the checkpoint."""
        self.flush()
        return {**self._description(), "pair": self.pair, "stamps": self.all_stamps()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a state is one of this store. What counts is the file, which may be ahead of the state.

        `differing(state["stamps"], store.all_stamps())` are the rows that have changed since; whether they can be used
        depends on the other end's stamps. If another run has taken the file over since, all rows are forgotten. The
        checksum begins anew.

        Raises
        ------
        ValueError
            The state is of another store, or damaged.
        """
        self._ready()
        self._check_state(state, ("stamps",))
        if state.get("pair", self.pair) != self.pair:
            self.forget_all()
        self._behind.reset_checksum()

    @property
    def pair(self) -> int:
        """See `Store.pair`."""
        return self._file.pair

    @pair.setter
    def pair(self, number: int) -> None:
        self._ready()
        self._behind.drain()
        self._file.set_pair(number)

    def _description(self) -> State:
        return {**super()._description(), "fingerprint": self._fingerprint}

    def _load(self, rows: Ids, places: Ids, out: Rows) -> None:
        for place, payload in zip(places.tolist(), self._behind.read(rows), strict=True):
            self._format.decode(payload, out[place])

    def _keep(self, rows: Ids, payload: Any, stamps: Stamps) -> None:
        self._behind.write(rows, payload, stamps)

    def _forgotten(self, rows: Ids) -> None:
        self._behind.drain()
        self._file.forget(rows, self._ledger.marks[rows])
