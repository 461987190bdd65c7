"""Plot runs of ``apps.train``.

``python -m apps.train.plot dense.json marsit.json --out runs.png`` draws test accuracy against epochs, against bytes
sent and against training seconds, with one line for each run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from apps.figure_style import looks_of
from apps.plotting import headline, listed, new_figure, plain_numbers, save, unit_ticks
from apps.train.run_records import epochs, read_run, settings

_AXES = (
    ("epoch", "epochs"),
    ("bytes_so_far_per_rank", "bytes that a rank sent"),
    ("seconds_so_far", "training seconds"),
)
_TICKS = (0, 20, 50, 70, 80, 90, 95, 98, 99, 100)
_MOST_MARKED_EPOCHS = 40


def label(record: dict[str, Any]) -> str:
    """A short name of a run: its method and the options that the user gave."""
    options = [f"{key}={value}" for key, value in record["algorithm_options"].items() if key != "full_precision_every"]
    period = record["algorithm_options"].get("full_precision_every")
    name = record["algorithm"] + (f"-{period}" if period else "")
    return " ".join([name, *options])


def plot(runs: Sequence[tuple[str, list[dict[str, Any]]]], out: Path) -> None:
    """Draw accuracy against epochs, bytes and seconds, from the name and records of each run.

    The suffix of `out` names the format. A record of another program raises ValueError.
    """
    note = _note([settings(*run) for run in runs])
    of_epochs = {name: epochs(name, records) for name, records in runs}
    looks = looks_of(of_epochs)
    figure, panels = new_figure(2, 2, height=5.6)
    for axis, (field, title) in zip(panels.flat, _AXES, strict=False):
        for name, records in of_epochs.items():
            look = looks[name]._asdict() | {"markersize": 4}
            if len(records) > _MOST_MARKED_EPOCHS:
                look["marker"] = None
            accuracy = [100 * record["accuracy"] for record in records]
            axis.plot([record[field] for record in records], accuracy, label=name, **look)
        axis.set_xlabel(title)
    panels[0][0].xaxis.set_major_locator(MaxNLocator(integer=True))
    sent = panels[0][1]
    if all(record["bytes_so_far_per_rank"] > 0 for records in of_epochs.values() for record in records):
        sent.set_xscale("log")
    unit_ticks(sent.xaxis, "B")
    _stretch(panels[0][0])
    figure.supylabel("test accuracy, % (scale stretched towards 100 %)", fontsize=10)
    empty = panels[1][1]
    empty.axis("off")
    empty.legend(handles=panels[0][0].get_lines(), loc="center", fontsize=8)
    headline(figure, finding(of_epochs), note)
    save(figure, out)


def finding(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """The title of a figure: the run that sends fewest bytes compared with dense, or the run that ends best."""
    ends = {name: records[-1] for name, records in runs.items() if records}
    if not ends:
        return "No run finished an epoch"
    dense = next((end for name, end in ends.items() if name.startswith("dense") and end["bytes_so_far_per_rank"]), None)
    fewest = min(ends, key=lambda name: float(ends[name]["bytes_so_far_per_rank"]))
    if dense is None or ends[fewest] is dense or not ends[fewest]["bytes_so_far_per_rank"]:
        best = max(ends, key=lambda name: float(ends[name]["accuracy"]))
        return f"{best} ends with {100 * ends[best]['accuracy']:.1f} % of test accuracy"
    factor = dense["bytes_so_far_per_rank"] / ends[fewest]["bytes_so_far_per_rank"]
    points = 100 * (ends[fewest]["accuracy"] - dense["accuracy"])
    where = f"{abs(points):.1f} points {'above' if points > 0 else 'below'}" if abs(points) >= 0.05 else "at"
    return f"{fewest} sends {factor:.3g} times fewer bytes than dense and ends {where} its accuracy"


_SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "dataset": lambda run: str(run["dataset"]),
    "model": lambda run: str(run["model"]),
    "ranks": lambda run: str(run["ranks"]),
    "optimizer": lambda run: f"{run['optimizer']} {run['lr']:g}",
}
"""Settings that a note names."""


def _note(runs: Sequence[dict[str, Any]]) -> str:
    """The settings of all runs."""
    values = {name: listed(show(run) for run in runs) for name, show in _SHOWN.items()}
    return ", ".join(f"{value} ranks" if name == "ranks" else value for name, value in values.items())


def names(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A short name of each run: its method, and those of the note's settings that differ between the runs."""
    differing = [(name, show) for name, show in _SHOWN.items() if len({show(run) for run in runs}) > 1]
    return [
        ", ".join([label(run), *(f"{show(run)} ranks" if name == "ranks" else show(run) for name, show in differing)])
        for run in runs
    ]


def _stretch(axis: Axes) -> None:
    """Scale accuracy by the logarithm of the error, to show both tenths of a per cent near 100 and runs that fail."""
    axis.set_yscale(
        "function",
        functions=(
            lambda percent: -np.log(np.maximum(100.5 - percent, 0.01)),
            lambda stretched: 100.5 - np.exp(-stretched),
        ),
    )
    low, high = axis.get_ylim()
    shown = [tick for tick in _TICKS if low <= tick <= high]
    axis.yaxis.set_major_locator(FixedLocator(shown) if len(shown) > 2 else MaxNLocator(5))
    axis.yaxis.set_minor_locator(NullLocator())
    plain_numbers(axis.yaxis)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apps.train.plot", description="Compare runs of apps.train.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="written by apps.train --json")
    parser.add_argument("--out", type=Path, default=Path("runs.png"), help="image to write")
    options = parser.parse_args(argv)
    try:
        runs, found = [], []
        for path in options.runs:
            runs.append(read_run(path))
            epochs(str(path), runs[-1])  # an error then has the name of the file, not the label of the run
            found.append(settings(str(path), runs[-1]))
        called = names(found)
        if len(set(called)) < len(called):
            called = [f"{name} ({path.stem})" for name, path in zip(called, options.runs, strict=True)]
        plot(list(zip(called, runs, strict=True)), options.out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
