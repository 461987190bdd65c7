"""Progress of a long measurement on rank 0, also while one call takes minutes."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

EVERY_S = 5.0


class Progress:
    """Lines on stderr with the measurements done and the time to go: at once, with each new work, and every 5 s."""

    def __init__(self, prefix: str, budget_s: float, active: bool) -> None:
        self._prefix, self._active, self._work = prefix, active, "starting"
        self.n_done, self.n_measurements = 0.0, 0
        self._start, self._budget_s = time.perf_counter(), budget_s
        self._ended = threading.Event()
        # wakes for each line alone
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._print()
        if self._active:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._active:
            self._thread.join()

    def begin(self, work: str) -> None:
        """Name the work under way."""
        self._work = work
        self._print()

    def line(self, elapsed_s: float) -> str:
        """Return the line after so many seconds. The budget limits the time to go."""
        left_s = max(0.0, self._budget_s - elapsed_s)
        expected_s = elapsed_s * (self.n_measurements - self.n_done) / self.n_done if self.n_done >= 1 else left_s
        to_go = f"{'about' if expected_s < left_s else 'at most'} {min(expected_s, left_s):.0f} s to go"
        done = f"{int(self.n_done)} of {self.n_measurements} measurements, " if self.n_measurements else ""
        return f"{self._prefix}, {done}{to_go}: {self._work}"

    def _repeat(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._print()

    def _print(self) -> None:
        if self._active:
            print(self.line(time.perf_counter() - self._start), file=sys.stderr, flush=True)
