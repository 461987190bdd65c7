"""Show a run on rank 0: a progress bar on a terminal, a line for each epoch, and a table at the end."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from apps.pipeline.options import Options
from apps.records import Record
from mpicomp.cli.command import on_terminal

MB = 1e6


class Report:
    """Report of a run; on ranks that are not `active`, every method does nothing."""

    def __init__(self, active: bool, options: Options, steps_per_epoch: int) -> None:
        self._options = options
        self._console = Console(quiet=not active, highlight=False, soft_wrap=True, force_terminal=on_terminal())
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self._console, transient=True, disable=not (active and self._console.is_terminal),
        )  # fmt: skip
        self._steps = steps_per_epoch
        self._task = self._progress.add_task(options.name, total=options.epochs * steps_per_epoch)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def resumed(self, path: str, epochs: int) -> None:
        """Name the checkpoint that the run goes on from."""
        self._console.print(f"resumed from {path}", markup=False)
        self._progress.advance(self._task, epochs * self._steps)

    def advance(self) -> None:
        """Move the progress bar by one step."""
        self._progress.advance(self._task)

    def epoch(self, record: Record) -> None:
        """Show an epoch."""
        self._console.print(
            f"epoch {record['epoch']:3d}/{self._options.epochs}  loss {record['loss']:.4f}  "
            f"validation {record['validation_loss']:.4f}  perplexity {record['perplexity']:.3f}  "
            f"{record['bytes_forward'] / MB:.3g} MB forward, {record['bytes_backward'] / MB:.3g} MB backward  "
            f"{record['seconds']:.1f} s",
            markup=False,
        )

    def result(self, record: Record) -> None:
        """Show the outcome."""
        epochs = record["epochs"]
        sent = sum(each["bytes_forward"] + each["bytes_backward"] for each in epochs)
        table = Table(show_header=False, box=None)
        for label, value in (
            ("method", record["name"]),
            ("grid", f"{self._options.stages} stages x {self._options.replicas} replicas"),
            ("perplexity", f"{epochs[-1]['perplexity']:.3f}" if epochs else "-"),
            ("sent between stages", f"{sent / MB:.3g} MB"),
            ("micro-batches kept, stage 0", str(record["most_alive"])),
            ("both ends of all cuts alike", "yes" if record["cuts_alike"] else "NO"),
            ("training", f"{sum(each['seconds'] for each in epochs):.1f} s"),
        ):
            table.add_row(label, value)
        self._console.print(table)
