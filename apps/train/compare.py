"""Train one classifier through four methods, one after the other, and show them side by side.

``python -m apps.train.compare`` starts ``mpirun`` itself. Dense float32, Marsit with a full-precision round every 100
steps, Marsit without any, and cascading compression, which fails and is there to show it. Options it does not know go
to ``apps.train``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from apps.launch import JobFailed, mpi_environment, python_command, run
from apps.train.elsewhere import LATENCY_S, RATES, seconds_elsewhere
from apps.train.options import positive
from apps.train.plot import plot
from apps.train.report import STATUS_DIVERGED
from apps.train.run_records import read_run
from mpicomp.cli.advise.report import WORTH

RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dense", "dense", ("--algorithm", "dense")),
    ("marsit-100", "Marsit, K = 100", ("--algorithm", "marsit", "--full-precision-every", "100")),
    ("marsit", "Marsit, K = none", ("--algorithm", "marsit", "--full-precision-every", "none")),
    # Without normalisation its steps grow beyond float32 within a few rounds and there is no accuracy to show.
    ("cascading", "cascading SSDM", ("--algorithm", "cascading-ssdm", "--option", "normalise=True")),
)
"""File stem, title and options of each run."""
RANKS_A_CORE = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apps.train.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=_ranks, default=4, help="MPI ranks of each run (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for JSON lines and the plot")
    options, training_options = parser.parse_known_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        command = python_command(options.ranks, ["-m", "apps.train"])
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results: list[tuple[str, list[dict[str, Any]]]] = []
    for stem, title, method in RUNS:
        console.print(f"[bold]{title}[/bold], {options.ranks} ranks")
        path = options.out / f"{stem}.json"
        path.unlink(missing_ok=True)
        arguments = [*_DEFAULTS, *training_options, *method, "--json", str(path)]
        status, _ = run([*command, *arguments], mpi_environment(), capture=False)
        if status not in (0, STATUS_DIVERGED):
            print(f"error: the run of {title} ended with status {status}; its message is above", file=sys.stderr)
            return 1
        results.append((title, read_run(path)))
    picture = options.out / "compare.png"
    plot(results, picture)
    console.print(_table(results))
    if options.ranks > 1:
        _show_elsewhere(console, results)
    console.print(f"records and plot: {options.out}/*.json, {picture}")
    return 0


def _ranks(text: str) -> int:
    """A number of ranks that one machine may bear: each is a process that loads PyTorch."""
    ranks, most = positive(text), RANKS_A_CORE * (os.cpu_count() or 1)
    if ranks > most:
        raise argparse.ArgumentTypeError(f"{text} are more than {RANKS_A_CORE} for each core of this machine, {most}")
    return ranks


_DEFAULTS = ("--dataset", "digits", "--epochs", "20", "--topology", "ring")


def _table(results: Sequence[tuple[str, list[dict[str, Any]]]]) -> Table:
    table = Table(title="test accuracy and what it cost to communicate", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("method", "accuracy", "bits/element", "MB/rank", "communicating", "training"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for title, records in results:
        diverged = records[-1]["kind"] == "diverged"
        epochs = [record for record in records if "accuracy" in record]
        if not epochs:
            table.add_row(title, "diverged", "-", "-", "-", "-")
            continue
        last = epochs[-1]
        table.add_row(
            title,
            f"diverged, epoch {records[-1]['epoch']}" if diverged else f"{last['accuracy']:.2%}",
            f"{last['bits_per_element']:.2f}",
            f"{last['bytes_so_far_per_rank'] / 1e6:.2f}",
            f"{last['seconds_communicating_so_far']:.2f} s",
            f"{last['seconds_so_far']:.2f} s",
        )
    return table


def _show_elsewhere(console: Console, results: Sequence[tuple[str, list[dict[str, Any]]]]) -> None:
    """Print the predicted times of the runs where there is a network. This is no part of the runs, and may fail."""
    ends = {title: [record for record in records if "accuracy" in record][-1:] for title, records in results}
    whole = {title: end[0] for title, end in ends.items() if end}
    try:
        found = dict(zip(whole, seconds_elsewhere(list(whole.values())), strict=True))
    except JobFailed as error:
        console.print(f"what it would take on a network was not predicted: {error}")
        return
    console.print(
        "These ranks share one machine. No network lies between them, so here compressing costs time and saves none.\n"
        "The model of `mpicomp advise` predicts for the same run on a network, with a processor, a link and "
        f"{1e6 * LATENCY_S:.0f} us of latency for each rank:"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method")
    for column in ("measured here", *RATES):
        table.add_column(column, justify="right", no_wrap=True)
    for title, seconds in found.items():
        table.add_row(title, *(f"{each:.2f} s" for each in (whole[title]["seconds_so_far"], *seconds.values())))
    console.print(table)
    if found.keys() - {RUNS[-1][1]}:
        console.print(_fastest(found))


def _fastest(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the best choice on each network; the last of `RUNS`, which fails to learn, does not compete."""
    dense, failure, told = RUNS[0][1], RUNS[-1][1], []
    for rate in RATES:
        times = {title: seconds[rate] for title, seconds in found.items() if title != failure}
        best = min(times, key=lambda title: times[title])
        gain = times.get(dense, math.inf) / times[best]
        told.append(f"{rate}: {best}, {gain:.1f} times as fast as {dense}" if gain >= WORTH else f"{rate}: {dense}")
    return (
        f"so take, on links of {'; '.join(told)}\n"
        f"({dense} where nothing is {WORTH} times as fast; a larger model sends more, and gains more)"
    )


if __name__ == "__main__":
    sys.exit(main())
