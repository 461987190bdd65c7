"""Store in memory, which is taken when a row is first written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives.annotations import Bytes, override
from mpicomp.codecs.options import whole
from mpicomp.codecs.rows.row_codec import RowCodec, Rows
from mpicomp.pipeline.store import State, Store
from mpicomp.pipeline.store_rows import Ids, Stamps, row_code, seen, sum_codes


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
        ids = np.flatnonzero(seen(self._ledger.marks))
        found = {"pair": self.pair, "stamps": self.all_stamps(), "ids": ids, "rows": self._payload[ids]}
        return {**self._description(), **found}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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

    @override
    def _store_forgotten(self, rows: Ids) -> None:
        return
