"""Time that kills cost a training, by its own pace before and after each of them.

Two jobs of the same training differ in pace by a fifth and more, for as long as their processes live: in the pages that
the system gives them, and in how often they return memory to it. Against another job such a difference is taken for the
cost of kills. A training's own pace within half a minute has no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Times: TypeAlias = NDArray[np.float64]


class Commits:
    """Samples of a training by the time of their commit."""

    def __init__(self, times: Times, counts: Sequence[int]) -> None:
        # a time before the last one counts as the last one
        self._times = np.maximum.accumulate(times)
        # counts are negative where steps were given up
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def between(self, start: float, end: float) -> int:
        """Return the samples from `start` up to, and without, `end`."""
        first, last = np.searchsorted(self._times, (start, end))
        return int(self._before[last] - self._before[first])


def seconds_lost(commits: Commits, kill: float, settled: float, window: float) -> float | None:
    """Return the seconds of training that a kill cost; None where a window around it has no samples."""
    # `settled` is the first commit behind the kill and any restart
    close = settled + window
    around = [commits.between(*span) for span in ((kill - window, kill), (close, close + window))]
    if min(around) <= 0:
        return None
    # the span's length, less the time of its samples at the mean pace of the windows before and behind it
    return close - kill - 2 * window * commits.between(kill, close) / sum(around)


def part_kept(lost: Sequence[float | None], seconds: float) -> float | None:
    """Return the part of a training's time that its kills left it; None where the cost of no kill is known."""
    known = [one for one in lost if one is not None]
    if lost and not known:
        return None
    return 1 - (len(lost) * sum(known) / len(known) / seconds if lost else 0.0)
