"""Turn a request to stop into a checkpoint.

A batch system announces preemption or a time limit with SIGTERM. Open MPI's ``mpirun`` passes SIGTERM on to the ranks,
but kills them a quarter of a second later and reports a failure. It passes SIGUSR1 on and does no more, so batch
scripts send SIGUSR1. Both signals mean "save and end" here. They may reach the ranks at different moments, so the ranks
agree after each step.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A context in which SIGTERM and SIGUSR1 set `requested` instead of ending the process; for the main thread only.

    After the first of these signals the process ignores them to its end: Slurm and its launcher may send two, and the
    second must not kill a rank that has saved its state and is about to end.
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
