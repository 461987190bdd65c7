"""Rounds of calls in turn until a budget of time is spent, on which all ranks agree."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from collectives import Communicator
from mpicomp.cli.cluster_report.progress import Progress
from mpicomp.cli.timing import Calls, elapsed, slowest, turns

FEWEST, MOST = 3, 20  # timed calls of each


class Budget:
    """Time that is left, by the clock of rank 0; its methods are collective."""

    def __init__(self, comm: Communicator, limit_s: float) -> None:
        self._comm, self._limit_s, self._start = comm, limit_s, time.perf_counter()

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return float(self._comm.broadcast_object(time.perf_counter() - self._start))

    def left_s(self) -> float:
        """Return the seconds that are left, negative once the budget is spent."""
        return self._limit_s - self.elapsed_s()


def timed_rounds(
    calls: Calls, comm: Communicator, share_s: float, budget: Budget, progress: Progress
) -> dict[str, list[float]]:
    """Return the seconds of calls in turn, on the slowest rank, for about `share_s` seconds; collective."""
    mine: dict[str, list[float]] = {name: [] for name in calls}
    start_s, first = budget.elapsed_s(), progress.n_done
    for index, name in enumerate(turns(dict.fromkeys(calls, MOST))):
        done, place = divmod(index, len(calls))
        is_over = place == 0 and done and (done + 1) / done * (budget.elapsed_s() - start_s) > share_s
        # at least 3 rounds, or 1 once the budget is spent
        if is_over and (done >= FEWEST or budget.left_s() < 0):
            break
        mine[name].append(elapsed(calls[name], comm))
        progress.n_done = first + (index + 1) / MOST
    return {name: slowest(np.array(times), comm).tolist() for name, times in mine.items()}


def round_digits(value: float) -> float:
    """Return a number with seven digits."""
    return float(f"{value:.7g}")


def with_median(times: list[float]) -> dict[str, Any]:
    """Return times of calls, rounded, and their median."""
    short = [round_digits(one) for one in times]
    return {"seconds": short, "median_s": round_digits(float(np.median(short)))}
