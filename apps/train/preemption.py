"""Turning a request to stop into a checkpoint.

A batch system announces preemption or a time limit with SIGTERM. Open MPI's ``mpirun`` passes a SIGTERM of its own on,
but kills the ranks a quarter of a second later and calls that a failure; SIGUSR1 it only passes on: batch scripts send
it that. Both are taken here as "save and end"; ranks may hear it at different moments, so they agree at the next step.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While entered, SIGTERM and SIGUSR1 set `requested` instead of ending the process. Main thread only.

    Once one has come they do no more than that for the rest of the process: Slurm and its launcher may send two, and
    the second must not kill a rank that has saved and is about to end.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.requested:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
