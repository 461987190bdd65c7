"""Nearest of a few levels in each row, with a scale for each bucket: activations and their gradients in pipelines.

Codes and scales are those of `mpicomp.codecs.Levels`, whose buckets begin again with every row, so that the last of a
row may be short. Nothing is drawn: messages may be kept in these codes, too.

Wire format: the codes of all buckets, row after row (`mpicomp.kernels.cpu.levels`), a zero byte where their number is
odd, then their scales as bfloat16. With 2, 4, 8 and 16 levels a bucket takes whole words of 64 codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from collectives.annotations import Array, Bytes, override
from mpicomp.codecs.base import Draw
from mpicomp.codecs.level_buckets import MAGNITUDES, Buckets
from mpicomp.codecs.levels import Levels
from mpicomp.codecs.rows.row_codec import AddingRows, Keys, Rows, check_pair, check_payload, check_rows


@dataclass(frozen=True, slots=True)
class LevelRows(AddingRows):
    """Sends the nearest of a few levels for normal values, times a scale for each bucket of a row.

    Parameters
    ----------
    levels : 2, 3, 4, 8, 16 or 256
        Take 1, 1.6, 2, 3, 4 and 8 bits an element. 256 levels are equidistant.
    bucket : int
        Elements of a row that share a scale of 16 bits: a multiple of 64, up to 65536. The last bucket of a row may be
        shorter.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import LevelRows
    >>> codec, values = LevelRows(levels=3), np.array([[2.0, -0.1, -2.0], [0.5, 0.5, 0.1]], np.float32)
    >>> payload, decoded = np.empty(codec.nbytes(rows=2, columns=3), np.uint8), np.empty_like(values)
    >>> codec.encode(values, payload)
    >>> codec.decode(payload, decoded)
    >>> decoded.round(1)
    array([[ 2. ,  0. , -2. ],
           [ 0.5,  0.5,  0. ]], dtype=float32)

    See Also
    --------
    RowQuantizer : equidistant levels, one scale for each row
    Levels : the same code for vectors
    """

    levels: int = 4
    bucket: int = 128

    def __post_init__(self) -> None:
        checked = Levels(self.levels, self.bucket)
        object.__setattr__(self, "levels", checked.levels)
        object.__setattr__(self, "bucket", checked.bucket)

    @override
    def nbytes(self, rows: int, columns: int) -> int:
        return _lay_out(self, rows * columns, columns)[1].nbytes

    @override
    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        check_rows("the values", values)
        self._encode(values, payload)

    @override
    def encode_delta(
        self, values: Rows, message: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None
    ) -> None:
        check_pair(values, message)
        with np.errstate(all="ignore"):
            self._encode(values - message, payload)
        self.decode_delta(payload, message)

    @override
    def _decode(self, payload: Bytes, out: Rows, adding: bool) -> None:
        if not adding:
            out.fill(0)
        levels, buckets = _lay_out(self, out.size, out.shape[-1])
        found = payload.copy()  # kernels take arrays that begin at a multiple of a word
        scales = found[found.size - 2 * len(buckets.starts) :].view(np.uint16)
        scales[self._beyond(scales)] = 0  # only damage brings these
        levels.relay(buckets, out.reshape(-1), None, incoming=found)

    def _encode(self, values: Rows, payload: Bytes) -> None:
        check_payload(self, payload, values.shape)
        columns, flat = values.shape[-1], values.reshape(-1)
        levels, buckets = _lay_out(self, flat.size, columns)
        found = np.empty(payload.size, np.uint8)
        levels.relay(buckets, np.empty_like(flat), found, own=(flat, None))
        beyond = self._beyond(found[found.size - 2 * len(buckets.starts) :].view(np.uint16))
        if beyond.any():
            row = int(buckets.starts[beyond.argmax()]) // columns
            if not np.isfinite(flat[row * columns : (row + 1) * columns]).all():
                raise ValueError(f"the values contain NaN or infinity, first in row {row}: the activations diverged")
            raise OverflowError(f"row {row} is so large that its sums overflow float32: scale the values down")
        payload[:] = found

    def _beyond(self, scales: Array) -> Array:
        """Return which scales, bfloat16, are not finite, or not finite times the largest level."""
        level = 127.0 if self.levels == 256 else MAGNITUDES[self.levels][-1]
        most = (np.finfo(np.float32).max / np.float32(max(level, 1.0))).view(np.uint32) >> np.uint32(16)
        beyond: Array = (scales & np.uint16(0x7FFF)) > most  # numbers are in the order of their bits
        return beyond


@lru_cache(maxsize=16)
def _lay_out(codec: LevelRows, n: int, columns: int) -> tuple[Levels, Buckets]:
    """Return the codec of n elements in rows, and their buckets."""
    levels, rows, first = Levels(codec.levels, codec.bucket), n // columns, np.arange(0, columns, codec.bucket)
    starts = np.arange(0, n, columns)[:, np.newaxis] + first
    return levels, levels.lay_out(starts.reshape(-1), np.tile(np.minimum(codec.bucket, columns - first), rows))
