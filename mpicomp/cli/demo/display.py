"""Progress of the demo's trainings: bars on a terminal if rich is installed, else lines on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from mpicomp.cli.command import on_terminal
from mpicomp.cli.demo import COMMAND
from mpicomp.cli.demo.training import Point

if TYPE_CHECKING:
    from rich.progress import Progress


def describe(point: Point) -> str:
    """Return the figures of a point in words."""
    return (
        f"{point.seconds:5.1f} s  {1e-6 * point.bytes_sent:5.1f} MB sent by each rank  "
        f"accuracy {100 * point.accuracy:4.1f} %"
    )


class Trainings:
    """Display of one training after the other, which stay visible; nothing if it is not `active`."""

    def __init__(self, active: bool) -> None:
        self._active, self._name, self._steps = active, "", 0
        # drawn only when a step begins: a drawing thread would take processor time from the ranks
        self._bars = _bars() if active and on_terminal() else None

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, name: str, steps: int) -> None:
        """Display the next training, which makes at most so many steps."""
        self._name, self._steps = name, steps
        if self._bars is not None:
            self._task = self._bars.add_task(name, total=steps, found="")

    def report(self, step: int, point: Point | None) -> None:
        """Display the number of steps so far, and the newest point if there is one."""
        if self._bars is not None:
            self._bars.update(self._task, completed=step)
            if point is not None:
                self._bars.update(self._task, found=describe(point))
            self._bars.refresh()
        elif self._active and point is not None:
            line = f"{COMMAND}: {self._name}, step {step:3} of at most {self._steps}: {describe(point)}"
            print(line, file=sys.stderr, flush=True)

    def end(self, step: int) -> None:
        """Display that the training has ended after so many steps."""
        if self._bars is not None:
            self._bars.update(self._task, completed=step, total=step)
            self._bars.refresh()


def _bars() -> Progress | None:
    """Return bars that stay when they end; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        return None
    columns = (
        TextColumn("{task.description:>6}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[found]}"),
    )
    return Progress(*columns, console=Console(force_terminal=True, soft_wrap=True), auto_refresh=False)
