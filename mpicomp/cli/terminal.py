"""What a command says of itself while it works: whether a person looks on, and how far it has come."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress


def on_terminal() -> bool:
    """Whether a person sees the output of this process.

    Open MPI gives its ranks a pseudo-terminal even if its own output goes to a file. So the output of the parent, which
    is the launcher, must be a terminal too.
    """
    if not sys.stdout.isatty():
        return False
    try:
        launcher_output = Path(f"/proc/{os.getppid()}/fd/1").readlink()
    except OSError:
        return True
    return str(launcher_output).startswith("/dev/")


class Steps:
    """Tells which of `n_steps` steps is under way: a bar on a terminal, if rich is installed, and else lines on stderr.

    On ranks that are not `active` it says nothing. Nothing moves between two steps: a thread that drew would take its
    time from what is measured meanwhile.
    """

    def __init__(self, command: str, n_steps: int, active: bool) -> None:
        self._command, self._n_steps, self._active = command, n_steps, active
        self._done, self._start = 0, time.perf_counter()
        self._bar = _bar() if active and on_terminal() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._n_steps)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """The next step begins; `what` says what it does."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=self._done)
            self._bar.refresh()
        elif self._active:
            elapsed_s = time.perf_counter() - self._start
            line = f"{self._command}: step {self._done + 1} of {self._n_steps}, after {elapsed_s:.0f} s: {what}"
            print(line, file=sys.stderr, flush=True)
        self._done += 1


def _bar() -> Progress | None:
    """A bar that is gone when it ends; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    console = Console(force_terminal=True, soft_wrap=True)
    return Progress(*columns, console=console, transient=True, auto_refresh=False)
