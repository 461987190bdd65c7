"""Times of one vector's calls, and of the training steps that they are part of, as one rank sees them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mpicomp.auto.trials import TURNS, Place, Side, Times

ALIKE = 0.1  # periods that differ by less are of one training step
COUNT = len(Side) * (1 + TURNS)  # numbers that ranks exchange


class Front:
    """What the vectors of a communicator share on a rank.

    Attributes
    ----------
    ended_s : float
        When the last of their measured calls ended.
    """

    def __init__(self) -> None:
        self.ended_s = -math.inf
        self._step = -1
        self._periods: NDArray[np.float64] | None = None

    def common(self, step: int, periods: NDArray[np.float64]) -> NDArray[np.float64]:
        """Periods as the first vector of this training step has them, so that all vectors decide by the same.

        The ones given, if they are of another training: two optimizers may have steps of the same numbers.
        """
        known = self._periods
        if self._step != step or known is None or not np.allclose(periods[0], known[0], rtol=ALIKE, atol=0):
            self._step, self._periods = step, periods
            return periods
        return known


class Stopwatch:
    """Times of one vector, by side.

    Of calls in flight at once each counts from when the one that ended before it had ended, or from its own
    beginning: the sum is the time in which any was under way. It begins when the ranks have agreed on the call, so
    ranks that come late do not count.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._calls: list[list[float]] = [[] for _ in Side]
        self._periods: list[list[list[float]]] = [[[] for _ in Side] for _ in range(TURNS)]
        self._last: tuple[int, Place | None, float] = (-1, None, 0.0)

    def begin(self, step: int, place: Place, same_block: bool, now: float) -> None:
        """A call begins; it counts for the side that its place says, or not at all."""
        before, last, began = self._last
        if same_block and last is not None and last.measured is not None and before == step - 1:
            self._periods[last.turn][last.measured].append(now - began)
        self._last = (step, place, now)

    def end(self, now: float) -> None:
        """The call has ended."""
        _, place, began = self._last
        if place is not None and place.measured is not None:
            self._calls[place.measured].append(now - max(began, min(now, self._front.ended_s)))
        self._front.ended_s = now

    def fail(self) -> None:
        """The call has failed: neither it nor the period counts."""
        self._last = (-1, None, 0.0)

    def report(self, step: int, row: NDArray[np.float64]) -> None:
        """Fill in what this rank tells the others: medians of calls, and of the periods of each turn."""
        own = np.array([[_median(times) for times in turn] for turn in self._periods])
        row[: len(Side)] = [_median(times) for times in self._calls]
        row[len(Side) :] = self._front.common(step, own).ravel()


def slowest(rows: NDArray[np.float64]) -> Times:
    """What all ranks know of what they have told each other."""
    calls, *periods = rows.max(axis=0).reshape(-1, len(Side)).tolist()
    return Times(calls, periods)


def _median(times: list[float]) -> float:
    return float(np.median(times)) if times else -1.0
