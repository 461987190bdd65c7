"""A store in memory: pages are taken when a row is first written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpicomp.codecs.options import whole
from mpicomp.codecs.rows.row_codec import RowCodec, Rows
from mpicomp.pipeline.checksum import code, together
from mpicomp.pipeline.stamps import Ids, Stamps, seen
from mpicomp.pipeline.store import State, Store


class MessageStore(Store):
    """The last messages of examples, in memory.

    Parameters
    ----------
    examples, row_shape, variants, codec
        As of `Store`.
    most_bytes : int, optional
        The most that all rows may take; None: the machine's memory. A store that is larger is refused at the start, not
        when memory has run out.

    Raises
    ------
    ValueError
        A parameter is out of range.
    MemoryError
        The rows would take more than `most_bytes`, or than the system gives.
    """

    kind = "memory"

    def __init__(
        self,
        examples: int,
        row_shape: Any,
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

    def _load(self, rows: Ids, places: Ids, out: Rows) -> None:
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            self._format.decode(self._payload[row], out[place])

    def _keep(self, rows: Ids, payload: Any, stamps: Stamps) -> None:
        pairs = zip(rows.tolist(), stamps.tolist(), payload, strict=True)
        codes = [code(row, stamp, one) for row, stamp, one in pairs]
        self._payload[rows] = payload
        self._sum = (self._sum + together(rows, stamps, codes)) % 2**64

    def _forgotten(self, rows: Ids) -> None:
        return

    def touched_checksum(self) -> int:
        """See `Store.touched_checksum`."""
        self._ready()
        return self._sum

    def reset_checksum(self) -> None:
        """See `Store.reset_checksum`."""
        self._ready()
        self._sum = 0

    def state_dict(self) -> State:
        """Copies of the rows that have a message, with their ids, and the stamps of all rows."""
        self._ready()
        ids = np.flatnonzero(seen(self._ledger.marks))
        found = {"pair": self.pair, "stamps": self.all_stamps(), "ids": ids, "rows": self._payload[ids]}
        return {**self._description(), **found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Store.load_state_dict`; all rows become those of the state."""
        self._ready()
        marks = self._check_state(state, ("stamps", "ids", "rows"))
        ids, payload = np.asarray(state["ids"]), np.asarray(state["rows"])
        if not np.array_equal(ids, np.flatnonzero(seen(marks))) or ids.dtype.kind not in "iu":
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

    def close(self) -> None:
        """See `Store.close`."""
        super().close()
        self._payload = np.zeros((0, self.row_bytes), np.uint8)
