"""Messages that stand for themselves; see `mpicomp.pipeline.activations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpicomp.codecs.base import Bytes, Draw
from mpicomp.codecs.rows.row_codec import RowCodec, Rows
from mpicomp.kernels.streams import Stream
from mpicomp.pipeline.rows import Ids, as_matrix, coded_matrix, row_keys
from mpicomp.pipeline.stamps import Stamps


class DirectCoding:
    """One end of a cut whose messages stand for themselves."""

    def __init__(self, codec: RowCodec, stream: Stream, source: int = 0) -> None:
        self._codec, self._stream, self._source, self._step = codec, stream, source, 0

    def check(self, ids: Ids | None) -> None:
        """See `Coding`."""

    def prepare(self, row_shape: tuple[int, ...]) -> None:
        """See `Coding`."""

    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        """See `Coding`."""
        rows, columns = coded_matrix(row_shape)
        return self._codec.nbytes(ids.size * rows, columns)

    def prefetch(self, ids: Ids) -> None:
        """See `Coding`."""

    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        """See `Coding`."""
        values = as_matrix(rows)
        draw = Draw(self._stream, self._step, self._source)
        self._codec.encode(values, payload, draw, row_keys(ids, rows.shape[1:]))

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

    def pairing(self) -> Stamps | None:
        """See `Coding`."""
        return None

    def settle(self, mine: Stamps, theirs: Stamps) -> int:
        """See `Coding`."""
        return 0

    def forget_all(self) -> None:
        """See `Coding`."""

    def checksum(self) -> int | None:
        """See `Coding`."""
        return None

    def digest(self) -> int:
        """See `Coding`."""
        return 0

    def close(self) -> None:
        """See `Coding`."""
