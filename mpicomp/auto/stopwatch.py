"""Times of a vector's calls, and of the training steps that contain them, as measured by one rank."""

from __future__ import annotations

import math

import numpy as np

from collectives.annotations import Doubles
from mpicomp.auto.trials import TURNS, Place, Side, Times

ALIKE = 0.1  # relative difference up to which periods belong to the same training step
COUNT = len(Side) * (1 + TURNS)  # numbers that ranks exchange


class Front:
    """Measurements that all vectors of a communicator share on a rank.

    Attributes
    ----------
    ended_s : float
        Time at which the last measured call of these vectors ended.
    """

    def __init__(self) -> None:
        self.ended_s = -math.inf
        self._step = -1
        self._periods: Doubles | None = None

    def common(self, step: int, periods: Doubles) -> Doubles:
        """Return the periods of the first vector in this training step, so that all vectors decide by the same ones.

        Returns `periods` if they belong to another training: two optimizers may use the same step numbers.
        """
        known = self._periods
        if self._step != step or known is None or not np.allclose(periods[0], known[0], rtol=ALIKE, atol=0):
            self._step, self._periods = step, periods
            return periods
        return known


class Stopwatch:
    """Times of one vector, by side.

    A call counts from its beginning or from the previous end of a call, whichever is later: the sum over calls in
    flight at once is the time in which any call was under way. A call begins once the ranks have agreed on it, so the
    wait for late ranks does not count.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self.clear()

    def clear(self) -> None:
        """Forget all times."""
        self._calls: list[list[float]] = [[] for _ in Side]
        self._periods: list[list[list[float]]] = [[[] for _ in Side] for _ in range(TURNS)]
        self._last: tuple[int, Place | None, float] = (-1, None, 0.0)

    def begin(self, step: int, place: Place, same_block: bool, now: float) -> None:
        """Start the time of a call; its place decides the side for which the call counts, if any."""
        before, last, began = self._last
        if same_block and last is not None and last.measured is not None and before == step - 1:
            self._periods[last.turn][last.measured].append(now - began)
        self._last = (step, place, now)

    def end(self, now: float) -> None:
        """Record the time of the call, which has ended."""
        _, place, began = self._last
        if place is not None and place.measured is not None:
            self._calls[place.measured].append(now - max(began, min(now, self._front.ended_s)))
        self._front.ended_s = now

    def fail(self) -> None:
        """Discard the time and the period of the call, which has failed."""
        self._last = (-1, None, 0.0)

    def report(self, step: int, row: Doubles) -> None:
        """Write this rank's report: the medians of calls, and of the periods of each turn."""
        own = np.array([[_median(times) for times in turn] for turn in self._periods])
        row[: len(Side)] = [_median(times) for times in self._calls]
        row[len(Side) :] = self._front.common(step, own).ravel()


def slowest(rows: Doubles) -> Times:
    """Return the times of the slowest rank, from the reports of all ranks."""
    calls, *periods = rows.max(axis=0).reshape(-1, len(Side)).tolist()
    return Times(calls, periods)


def _median(times: list[float]) -> float:
    return float(np.median(times)) if times else -1.0
