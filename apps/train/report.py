"""Show and record a training run, on rank 0."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from apps.train.agreement import naming_cure
from apps.train.run_records import MOST_DIGITS
from collectives import Communicator
from collectives.json_file import fields, parse_json
from collectives.recovery.newcomers import is_waiting
from mpicomp.cli.command import on_terminal

QUIET_S = 5.0  # between lines of progress, where no bar is shown
STATUS_DIVERGED = 3
"""Exit status of a run that met NaN or infinity; its record has the epoch."""


class Report:
    """Shows a progress bar on a terminal or one line per epoch elsewhere, then a table; writes JSON lines.

    Rank 0 does so, or after its death the new rank 0; a rank that waits does not. Every line has the fields of
    `header`, as they are when it is written. The lines of the epochs before a resume are kept; without any, the file
    starts from scratch.

    Parameters
    ----------
    comm
        Ranks of the run.
    json_path
        File of the JSON lines; None: no record is written.
    header
        Returns fields of each line.
    completed_epochs
        Epochs before a resume.
    """

    def __init__(
        self, comm: Communicator, json_path: Path | None, header: Callable[[], dict[str, Any]], completed_epochs: int
    ) -> None:
        self._comm, self._header, self._path, self._completed = comm, header, json_path, completed_epochs
        self._console = Console(
            quiet=not self._is_active, highlight=False, soft_wrap=True, force_terminal=on_terminal()
        )
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (self._is_active and self._console.is_terminal),
        )
        self._has_file, self._shown_at = False, 0.0
        if self._path is not None and self._is_active:
            self._open(self._path)

    @property
    def _is_active(self) -> bool:
        return self._comm.rank == 0 and not is_waiting(self._comm)

    def _open(self, path: Path) -> None:
        """Make the file, with the lines of the epochs that are completed."""
        with naming_cure(path, "--json file"):
            kept = _epoch_lines(path, self._completed)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(kept))
        self._has_file = True

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def print_line(self, text: str) -> None:
        """Print one line."""
        self._console.quiet = not self._is_active
        self._console.print(text, markup=False)

    def begin(self, description: str, n_steps: int, done: int) -> None:
        """Start the progress bar of a run of `n_steps` steps, of which `done` were made before a resume."""
        self.print_line(f"{self._comm.size} ranks, step {done} of {n_steps}")
        self._shown_at = time.monotonic()
        self._task = self._progress.add_task(description, total=n_steps, completed=done, state="")

    def advance(self, n_steps: int, done: int) -> None:
        """Move the progress bar, or print a line at times; after a death the run has more steps."""
        if not self._console.is_terminal and time.monotonic() - self._shown_at >= QUIET_S:
            self.print_line(f"step {done} of {n_steps}")
            self._shown_at = time.monotonic()
        self._progress.update(self._task, total=n_steps, completed=done)

    def epoch(self, record: dict[str, Any], n_epochs: int) -> None:
        """Record and show an epoch."""
        self._completed = record["epoch"] - 1
        self._write({"kind": "epoch", **self._header(), **record})
        accuracy = f"accuracy {record['accuracy']:.2%}"
        self._progress.update(self._task, state=accuracy)
        self.print_line(
            f"epoch {record['epoch']:3d}/{n_epochs}  loss {record['loss']:.4g}  {accuracy}  "
            f"{_bytes(record['bytes_so_far_per_rank'])} sent per rank  {record['seconds_so_far']:.1f} s, "
            f"{record['seconds_communicating_so_far']:.1f} s of it communicating"
        )

    def result(self, record: dict[str, Any]) -> None:
        """Record and show the outcome."""
        self._completed = record["epochs"]
        record = {"kind": "result", **self._header(), **record}
        self._write(record)
        self._console.quiet = not self._is_active
        table = Table(show_header=False, box=None)
        for label, value in (
            ("algorithm", f"{record['algorithm']} over {record['topology']}, {record['ranks']} ranks"),
            *([("links", f"emulated, {record['link']}")] if record["link"] else []),
            ("parameters", f"{record['count']:,}"),
            ("test accuracy", f"{record['accuracy']:.2%} (best {record['best_accuracy']:.2%})"),
            ("bits per element", f"{record['bits_per_element']:.2f}"),
            ("sent per rank", _bytes(record["bytes_so_far_per_rank"])),
            ("communicating", f"{record['seconds_communicating_so_far']:.2f} s"),
            ("training", f"{record['seconds_so_far']:.2f} s"),
        ):
            table.add_row(label, value)
        self._console.print(table)

    def diverged(self, epoch: int) -> None:
        """Record that training ended in `epoch` because a rank met NaN or infinity."""
        self._completed = epoch - 1
        self._write({"kind": "diverged", **self._header(), "epoch": epoch})

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is not None and self._is_active:
            if not self._has_file:  # the former rank 0 has died, perhaps while it wrote this line
                self._open(self._path)
            # JSON has no NaN or infinity, which may be the loss of a run that fails.
            record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            with naming_cure(self._path, "--json file"), self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def _epoch_lines(path: Path, completed_epochs: int) -> list[str]:
    """The lines of a record that a resumed run does not repeat."""
    if completed_epochs == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            record = fields(parse_json(line, most_digits=MOST_DIGITS), kind=str, epoch=int)
        except ValueError:
            continue  # The earlier run was killed while it wrote this line.
        if record["kind"] == "epoch" and record["epoch"] <= completed_epochs:
            kept.append(line + "\n")
    return kept


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
