"""Show and record a training run, on rank 0 alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from apps.train.agreement import naming_cure
from apps.train.run_records import MOST_DIGITS
from collectives.json_file import fields, parse_json
from mpicomp.cli.command import on_terminal

STATUS_DIVERGED = 3
"""Exit status of a run that met NaN or infinity; its record has the epoch."""


class Report:
    """Shows a progress bar on a terminal or one line per epoch elsewhere, then a table; writes JSON lines.

    Every line has the fields of `header`. The lines of the epochs before a resume are kept; without any, the file
    starts anew. On ranks other than 0, which are not `active`, every method does nothing.
    """

    def __init__(self, active: bool, json_path: Path | None, header: dict[str, Any], completed_epochs: int) -> None:
        self._active = active
        self._header = header
        self._path = json_path if active else None
        self._console = Console(quiet=not active, highlight=False, soft_wrap=True, force_terminal=on_terminal())
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (active and self._console.is_terminal),
        )
        if self._path is not None:
            with naming_cure(self._path, "--json file"):
                kept = _epoch_lines(self._path, completed_epochs)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text("".join(kept))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def print_line(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, markup=False)

    def begin(self, description: str, n_steps: int, done: int) -> None:
        """Start the progress bar of a run of `n_steps` steps, of which `done` were made before a resume."""
        self._task = self._progress.add_task(description, total=n_steps, completed=done, state="")

    def advance(self) -> None:
        """Move the progress bar by one step."""
        self._progress.advance(self._task)

    def epoch(self, record: dict[str, Any], n_epochs: int) -> None:
        """Record and show an epoch."""
        self._write({"kind": "epoch", **self._header, **record})
        accuracy = f"accuracy {record['accuracy']:.2%}"
        self._progress.update(self._task, state=accuracy)
        self.print_line(
            f"epoch {record['epoch']:3d}/{n_epochs}  loss {record['loss']:.4g}  {accuracy}  "
            f"{_bytes(record['bytes_so_far_per_rank'])} sent per rank  {record['seconds_so_far']:.1f} s, "
            f"{record['seconds_communicating_so_far']:.1f} s of it communicating"
        )

    def result(self, record: dict[str, Any]) -> None:
        """Record and show the outcome."""
        record = {"kind": "result", **self._header, **record}
        self._write(record)
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
        self._write({"kind": "diverged", **self._header, "epoch": epoch})

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is not None:
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
