"""Which rows a store has a message for, and how often their examples have been visited.

A stamp counts the visits of a row; 0: never. It only ever grows, also where a message is given up, so that one stamp
never stands for two messages. A row whose message was given up keeps its count, with the highest bit set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.options import whole

FORGOTTEN = np.uint32(1 << 31)
MOST_VISITS = (1 << 31) - 1
_MOST_ROWS = 1 << 40
_LISTED = 10
Ids = NDArray[np.int64]
Stamps = NDArray[np.uint32]


def seen(marks: Stamps) -> NDArray[np.bool_]:
    """Whether rows of these marks have a message."""
    found: NDArray[np.bool_] = (marks != 0) & (marks < FORGOTTEN)
    return found


def differing(mine: Any, theirs: Any) -> Ids:
    """Rows that the two ends of a cut cannot go on from, since they hold messages of different visits.

    Both ends then call ``store.forget(rows, theirs[rows])``, after which their stamps are equal and these examples'
    next messages are sent in full precision.

    Parameters
    ----------
    mine, theirs : uint32[n]
        What `all_stamps` returned on both ends.

    Returns
    -------
    int64[k]
        In ascending order.

    Raises
    ------
    ValueError
        The stamps are not of equally many rows.
    """
    one, other = _marks(mine), _marks(theirs)
    if one.shape != other.shape:
        raise ValueError(
            f"one end has stamps of {one.size} rows and the other of {other.size}: make both stores for the same "
            "examples and variants"
        )
    return np.flatnonzero(one != other).astype(np.int64, copy=False)


def _marks(stamps: Any) -> Stamps:
    found = np.asarray(stamps)
    if found.dtype != np.uint32 or found.ndim != 1:
        raise ValueError(f"stamps are uint32 in one dimension, not {found.dtype} of shape {found.shape}")
    return found


class Ledger:
    """The stamps of a store, and the check of row numbers.

    Parameters
    ----------
    examples : int
    variants : int
        Rows per example.

    Attributes
    ----------
    marks : uint32[examples * variants]
        Stamps, with the highest bit set where the message was given up.
    """

    def __init__(self, examples: int, variants: int) -> None:
        for name, value in (("examples", examples), ("variants", variants)):
            if not whole(value, 1, _MOST_ROWS):
                raise ValueError(f"{name} must be an integer of 1 to 2^40, not {value!r:.80}")
        self.examples, self.variants = int(examples), int(variants)
        self.marks: Stamps = np.zeros(self.examples * self.variants, np.uint32)

    def check(self, ids: Any) -> Ids:
        """Return ids as rows of the store, after checking that they are, each once.

        Raises
        ------
        ValueError
            They are no integers, out of range, or some occur more than once; names them.
        """
        rows = self._range(ids, self.marks.size, "ids")
        in_order = np.sort(rows)
        twice = in_order[1:][in_order[1:] == in_order[:-1]]
        if twice.size:
            raise ValueError(
                f"ids {_shown(np.unique(twice))} occur more than once in one micro-batch, and the two ends of a cut "
                "could keep different messages of theirs: put an example into a micro-batch once, or give each "
                "augmented variant a row of its own (variants=)"
            )
        return rows

    def row_ids(self, ids: Any, variants: Any) -> Ids:
        """Row of each example's variant: id * variants + variant."""
        examples = self._range(ids, self.examples, "examples")
        which = self._range(variants, self.variants, "variants", scalar=True)
        if which.ndim and which.shape != examples.shape:
            raise ValueError(f"{examples.size} examples have {which.size} variants: give one a piece, or one for all")
        return examples * self.variants + which

    def following(self, rows: Ids, stamps: Any = None) -> Stamps:
        """Stamps of a visit of these rows: what is given, or one more than before."""
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

    def forget(self, rows: Ids, stamps: Any = None) -> None:
        """Give up the messages of rows; their counts become those of `stamps` where these are higher."""
        count = self.marks[rows] & ~FORGOTTEN
        if stamps is not None:
            given = _marks(stamps)
            if given.shape != rows.shape:
                raise ValueError(f"{rows.size} rows are given {given.size} stamps: give one a piece")
            count = np.maximum(count, given & ~FORGOTTEN)
        self.marks[rows] = count | FORGOTTEN

    def stamps(self, rows: Ids) -> Stamps:
        """Visits of rows; 0 where there is no message."""
        marks = self.marks[rows]
        return np.where(seen(marks), marks, np.uint32(0))

    def _range(self, ids: Any, stop: int, name: str, *, scalar: bool = False) -> Ids:
        found = np.asarray(ids)
        if found.dtype.kind not in "iu" and found.size:
            raise ValueError(f"{name} must be integers, not {found.dtype} ({_shown(found.reshape(-1))})")
        if found.ndim != 1 and not (scalar and found.ndim == 0):
            raise ValueError(f"{name} must be integers in one dimension, not of shape {found.shape}")
        outside = found[(found < 0) | (found >= stop)] if found.size else found
        if outside.size:
            of = f" ({self.examples} examples of {self.variants} variants)" if name == "ids" else ""
            raise ValueError(f"{name} {_shown(np.atleast_1d(outside))} are not in 0 to {stop - 1}{of}")
        return found.astype(np.int64)


def _shown(ids: NDArray[Any]) -> str:
    text = ", ".join(str(one)[:40] for one in ids[:_LISTED].tolist())
    return f"{text} and {ids.size - _LISTED} more" if ids.size > _LISTED else text
