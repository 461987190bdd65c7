"""Rows of a store: their bytes, their stamps and their checksums.

A stamp counts the visits of a row; 0: never. It only ever grows, also where a message is forgotten, so that one stamp
never stands for two messages. A forgotten row keeps its count, with the highest bit set.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collectives.annotations import AnyArray, Bytes, Indices, Words
from mpicomp.codecs.options import whole
from mpicomp.codecs.rows.row_codec import RowCodec, Rows

Ids: TypeAlias = Indices
Stamps: TypeAlias = NDArray[np.uint32]
FORGOTTEN = np.uint32(1 << 31)
MOST_VISITS = (1 << 31) - 1
_MOST_ROWS = 1 << 40
_LISTED = 10
_HEAD = struct.Struct("<qI")


# Bytes ----------------------------------------------------------------------------------------------------------------


class RowFormat:
    """Bytes of the message of one example, float32 or coded."""

    def __init__(self, row_shape: int | tuple[int, ...], codec: RowCodec | None) -> None:
        shape = tuple(row_shape) if isinstance(row_shape, list | tuple) else (row_shape,)
        if not all(whole(length, 1) for length in shape):
            raise ValueError(f"row_shape must be integers of 1 or more, such as (tokens, width), not {row_shape!r:.80}")
        self.row_shape, self.codec = tuple(map(int, shape)), codec
        # both ends of a cut must keep the same rows
        if getattr(codec, "rounding", "nearest") != "nearest":  # of codecs of users, too
            raise ValueError(f"{codec!r:.200} rounds at random: a store takes codecs with rounding='nearest'")

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns that a codec sees of a message."""
        return (math.prod(self.row_shape[:-1]), self.row_shape[-1]) if self.row_shape else (1, 1)

    @property
    def nbytes(self) -> int:
        """Size of a message."""
        return 4 * math.prod(self.row_shape) if self.codec is None else self.codec.nbytes(*self.matrix)

    @property
    def name(self) -> str:
        """Name that both ends of a cut, and a file and the program that opens it, must have in common."""
        return "float32" if self.codec is None else repr(self.codec)

    def encode(self, rows: ArrayLike, count: int) -> Bytes:
        """Return a copy of `count` messages as uint8[count, nbytes]; ValueError for other shapes, types or values."""
        found = np.asarray(rows)
        if found.dtype != np.float32 or found.shape != (count, *self.row_shape):
            raise ValueError(
                f"rows of shape {found.shape} and type {found.dtype} are no messages of {count} examples: pass "
                f"float32 of shape {(count, *self.row_shape)}"
            )
        payload = np.empty((count, self.nbytes), np.uint8)
        if self.codec is None:
            payload.view(np.float32).reshape(found.shape)[...] = found
            return payload
        for row, coded in zip(np.ascontiguousarray(found), payload, strict=True):
            self.codec.encode(row.reshape(self.matrix), coded, None)
        return payload

    def decode(self, payload: Bytes, out: Rows) -> None:
        """Overwrite one message, a contiguous vector, by the decoded bytes."""
        if self.codec is None:
            out.view(np.uint8)[:] = payload
        else:
            self.codec.decode(payload, out.reshape(self.matrix))


# Stamps ---------------------------------------------------------------------------------------------------------------


def has_message(marks: Stamps) -> NDArray[np.bool_]:
    """Return which rows have a message, by their marks."""
    found: NDArray[np.bool_] = (marks != 0) & (marks < FORGOTTEN)
    return found


def differing(mine: ArrayLike, theirs: ArrayLike) -> Ids:
    """Return the rows for which the two ends of a cut hold messages of different visits.

    Both ends then call ``store.forget(rows, theirs[rows])``, after which their stamps are equal and these examples'
    next messages are sent in full precision.

    Parameters
    ----------
    mine, theirs : uint32[n]
        Results of `all_stamps` on both ends.

    Returns
    -------
    int64[k]
        In ascending order.

    Raises
    ------
    ValueError
        The stamps are not of equally many rows.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.pipeline import MessageStore, differing
    >>> one, other = (MessageStore(examples=4, row_shape=2) for end in range(2))
    >>> one.write([0, 3], np.ones((2, 2), np.float32))
    >>> other.write([0], np.ones((1, 2), np.float32))
    >>> differing(one.all_stamps(), other.all_stamps())
    array([3])
    """
    one, other = _marks(mine), _marks(theirs)
    if one.shape != other.shape:
        raise ValueError(
            f"one end has stamps of {one.size} rows and the other of {other.size}: make both stores for the same "
            "examples and variants"
        )
    return np.flatnonzero(one != other).astype(np.int64, copy=False)


def _marks(stamps: ArrayLike) -> Stamps:
    found = np.asarray(stamps)
    if found.dtype != np.uint32 or found.ndim != 1:
        raise ValueError(f"stamps are uint32 in one dimension, not {found.dtype} of shape {found.shape}")
    return found


class Ledger:
    """Stamps of a store's rows, `variants` for each example, and the check of row numbers."""

    def __init__(self, examples: int, variants: int) -> None:
        for name, value in (("examples", examples), ("variants", variants)):
            if not whole(value, 1, _MOST_ROWS):
                raise ValueError(f"{name} must be an integer of 1 to 2^40, not {value!r:.80}")
        self.examples, self.variants = int(examples), int(variants)
        self.marks: Stamps = np.zeros(self.examples * self.variants, np.uint32)  # highest bit: forgotten

    def check(self, ids: ArrayLike) -> Ids:
        """Return ids as rows of the store; ValueError names ids that are no integers, out of range or repeated."""
        rows = self._range(ids, self.marks.size, "ids")
        in_order = np.sort(rows)
        twice = in_order[1:][in_order[1:] == in_order[:-1]]
        if twice.size:
            raise ValueError(
                f"ids {_list_ids(np.unique(twice))} occur more than once in one micro-batch, and the two ends of a cut "
                "could keep different messages of theirs: put an example into a micro-batch once, or give each "
                "augmented variant a row of its own (variants=)"
            )
        return rows

    def row_ids(self, ids: ArrayLike, variants: ArrayLike) -> Ids:
        """Return the row of each example's variant: id * variants + variant."""
        examples = self._range(ids, self.examples, "examples")
        which = self._range(variants, self.variants, "variants", scalar=True)
        if which.ndim and which.shape != examples.shape:
            raise ValueError(f"{examples.size} examples have {which.size} variants: give one a piece, or one for all")
        return examples * self.variants + which

    def following(self, rows: Ids, stamps: ArrayLike | None = None) -> Stamps:
        """Return the stamps of a visit of these rows: those that are given, or one more than before."""
        if stamps is None:
            before = self.marks[rows] & ~FORGOTTEN
            if before.size and int(before.max()) >= MOST_VISITS:
                raise OverflowError(f"row {int(rows[before.argmax()])} was visited {MOST_VISITS} times: start a store")
            return before + np.uint32(1)
        given = self._range(stamps, MOST_VISITS + 1, "stamps", scalar=True)
        if given.ndim and given.shape != rows.shape:
            raise ValueError(f"{rows.size} rows are given {given.size} stamps: give one a piece, or one for all")
        if (given == 0).any():
            raise ValueError("a stamp of 0 stands for a row without a message: give 1 or more")
        return np.broadcast_to(given, rows.shape).astype(np.uint32)

    def forget(self, rows: Ids, stamps: ArrayLike | None = None) -> None:
        """Forget the messages of rows; their counts become those of `stamps` where these are higher."""
        count = self.marks[rows] & ~FORGOTTEN
        if stamps is not None:
            given = _marks(stamps)
            if given.shape != rows.shape:
                raise ValueError(f"{rows.size} rows are given {given.size} stamps: give one a piece")
            count = np.maximum(count, given & ~FORGOTTEN)
        self.marks[rows] = count | FORGOTTEN

    def stamps(self, rows: Ids) -> Stamps:
        """Return the visits of rows; 0 where there is no message."""
        marks = self.marks[rows]
        return np.where(has_message(marks), marks, np.uint32(0))

    def _range(self, ids: ArrayLike, stop: int, name: str, *, scalar: bool = False) -> Ids:
        found = np.asarray(ids)
        if found.dtype.kind not in "iu" and found.size:
            raise ValueError(f"{name} must be integers, not {found.dtype} ({_list_ids(found.reshape(-1))})")
        if found.ndim != 1 and not (scalar and found.ndim == 0):
            raise ValueError(f"{name} must be integers in one dimension, not of shape {found.shape}")
        outside = found[(found < 0) | (found >= stop)] if found.size else found
        if outside.size:
            of = f" ({self.examples} examples of {self.variants} variants)" if name == "ids" else ""
            raise ValueError(f"{name} {_list_ids(np.atleast_1d(outside))} are not in 0 to {stop - 1}{of}")
        return found.astype(np.int64)


def _list_ids(ids: AnyArray) -> str:
    text = ", ".join(str(one)[:40] for one in ids[:_LISTED].tolist())
    return f"{text} and {ids.size - _LISTED} more" if ids.size > _LISTED else text


# Checksums ------------------------------------------------------------------------------------------------------------


def row_code(row: int, stamp: int, payload: Bytes) -> int:
    """Return the CRC-32 of a message with its row and stamp, so that an exchange of rows or visits changes it."""
    return zlib.crc32(payload.data, zlib.crc32(_HEAD.pack(row, stamp)))


def sum_codes(rows: ArrayLike, stamps: ArrayLike, codes: ArrayLike) -> int:
    """Return the sum, modulo 2^64, of a 64-bit hash of each message's row, stamp and code."""
    with np.errstate(over="ignore"):
        place = _mix_bits(np.asarray(rows, np.int64).view(np.uint64))
        content = np.asarray(stamps, np.uint64) << np.uint64(32) | np.asarray(codes, np.uint64)
        # a sum does not depend on the order of messages, and sums of parts add up to that of the whole
        return int(_mix_bits(place ^ content).sum(dtype=np.uint64))


def _mix_bits(words: Words) -> Words:
    """Let every bit depend on every other: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
