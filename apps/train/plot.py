"""Plot runs of ``apps.train`` against each other.

``python -m apps.train.plot dense.json marsit.json --out runs.png`` draws test accuracy against epochs, against bytes
sent and against training seconds, with one line for each run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from apps.train.run_records import read_run, settings

_AXES = (
    ("epoch", 1.0, "epochs", False),
    ("bytes_so_far_per_rank", 1e-6, "MB sent per rank", True),
    ("seconds_so_far", 1.0, "training seconds", False),
)
_TICKS = (0, 20, 50, 70, 80, 90, 95, 98, 99, 100)
_MOST_MARKED_EPOCHS = 40


def label(record: dict[str, Any]) -> str:
    """A short name of a run: the method and what is not its default."""
    options = [f"{key}={value}" for key, value in record["algorithm_options"].items() if key != "full_precision_every"]
    period = record["algorithm_options"].get("full_precision_every")
    name = record["algorithm"] + (f"-{period}" if period else "")
    return " ".join([name, *options])


def plot(runs: Sequence[tuple[str, list[dict[str, Any]]]], out: Path) -> None:
    """Draw accuracy against epochs, bytes and seconds.

    Parameters
    ----------
    runs
        Name and records of each run.
    out
        Image file to write; its suffix names the format.

    Raises
    ------
    ValueError
        The first run does not tell its settings.
    """
    first = settings(*runs[0])
    figure, axes = plt.subplots(1, len(_AXES), figsize=(13, 4), sharey=True, layout="constrained")
    for axis, (field, factor, title, logarithmic) in zip(axes, _AXES, strict=True):
        for number, (name, records) in enumerate(runs):
            epochs = [record for record in records if record["kind"] == "epoch"]
            axis.plot(
                [record[field] * factor for record in epochs],
                [100 * record["accuracy"] for record in epochs],
                marker="osv^D"[number % 5] if len(epochs) <= _MOST_MARKED_EPOCHS else None,
                markersize=3.5,
                linewidth=1.2,
                label=name,
            )
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
        if logarithmic and all(record[field] > 0 for _, records in runs for record in records if field in record):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
    _stretch(axes[0])
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("test accuracy, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), frameon=False)
    figure.suptitle(
        f"{first['dataset']}, {first['model']}, {first['ranks']} ranks, {first['optimizer']} {first['lr']:g}"
    )
    figure.savefig(out, dpi=130)
    plt.close(figure)


def _stretch(axis: Axes) -> None:
    """Scale accuracy by the logarithm of the error: tenths of a per cent near 100 show, as does a run that fails."""
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
    axis.yaxis.set_major_formatter("{x:g}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apps.train.plot", description="Compare runs of apps.train.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="written by apps.train --json")
    parser.add_argument("--out", type=Path, default=Path("runs.png"), help="image to write")
    options = parser.parse_args(argv)
    try:
        runs = [read_run(path) for path in options.runs]
        names = [label(settings(str(path), records)) for path, records in zip(options.runs, runs, strict=True)]
        if len(set(names)) < len(names):
            names = [f"{name} ({path.stem})" for name, path in zip(names, options.runs, strict=True)]
        plot(list(zip(names, runs, strict=True)), options.out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
