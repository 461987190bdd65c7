"""``python -m apps.figures``: draw the figures of the documentation from the data that is kept in the repository.

The programs that measure write the same files and draw the same figures: ``apps.performance.cluster``, ``apps.scale``,
``apps.finetune --docs``. Without arguments all figures are drawn; names of data files draw theirs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from apps.figure_style import SETTINGS, WIDTH_INCHES
from apps.launch import PROJECT
from apps.records import read_record
from mpicomp.cli.demo.report import Comparison
from mpicomp.cli.demo.training import Point

FIGURES = PROJECT / "docs" / "figures"
DATA = FIGURES / "data"
RECORDS = PROJECT / "docs" / "records" / "frontier"


def _cluster(folder: Path) -> list[Path]:
    data = _module("apps.performance.cluster.picture_data")
    return list(data.draw_parts(data.read(DATA / data.NAME), folder))


def _demo(folder: Path) -> list[Path]:
    figure = _module("mpicomp.cli.demo.picture").make_figure(demo_comparison())
    dpi = SETTINGS["savefig.dpi"] * WIDTH_INCHES / figure.get_figwidth()  # it has more text than the others
    return [_module("apps.plotting").save(figure, folder / "demo.png", dpi)]


def demo_comparison() -> Comparison:
    """Return the trainings of ``mpicomp demo`` that README shows."""
    kept = read_record(DATA / "demo.json", dense=list, Marsit=list)
    dense, marsit = ([Point(**point) for point in kept[name]] for name in ("dense", "Marsit"))
    return Comparison(dense, marsit, kept["ranks"], True, kept["link"])


def _fine_tuning(folder: Path) -> list[Path]:
    return [_module("apps.finetune.report").draw(read_record(DATA / "fine-tuning.json"), folder / "fine-tuning.png")]


def _scale(folder: Path) -> list[Path]:
    _module("apps.scale.__main__").main([f"--json={DATA / 'scale.json'}", f"--out={folder}"])
    return [folder / f"scale-{name}.png" for name in ("times", "throughput", "split")]


def _split_learning(folder: Path) -> list[Path]:
    runs = read_record(DATA / "split-learning.json", runs=list)["runs"]
    return [_module("apps.pipeline.split.plot").draw(runs, folder / "split-learning.png")]


def _aq_sgd(folder: Path) -> list[Path]:
    return list(_module("apps.reproduce.aq_sgd.pictures").draw(read_record(DATA / "aq-sgd.json"), folder))


def _sparse_loco(folder: Path) -> list[Path]:
    found = read_record(DATA / "sparse-loco.json", runs=dict)["runs"]
    return [_module("apps.reproduce.sparse_loco").draw(found, folder / "reproduce-sparse-loco.png")]


def _frontier(folder: Path) -> list[Path]:
    pictures = _module("apps.frontier.pictures")
    times = {name: read_record(RECORDS / f"times-{name}.json") for name in pictures.SHOWN}
    drawn: list[Path] = pictures.draw_all(read_record(RECORDS / "learning.json"), times, folder)
    return drawn


def _module(name: str) -> Any:
    return import_module(name)  # some need PyTorch, others only matplotlib


DRAWN: Mapping[str, Callable[[Path], list[Path]]] = {
    "aq-sgd": _aq_sgd,
    "cluster": _cluster,
    "demo": _demo,
    "fine-tuning": _fine_tuning,
    "frontier": _frontier,
    "scale": _scale,
    "sparse-loco": _sparse_loco,
    "split-learning": _split_learning,
}
"""What draws the figures of each data file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 if a data file cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.figures", description="Draw the documentation's figures again."
    )
    names = ", ".join(DRAWN)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of data files: {names} (default: all)")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR", help="folder of the figures (docs/figures)")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in DRAWN]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {names}")
    try:
        for name in options.names or DRAWN:
            for path in DRAWN[name](options.out):
                print(f"wrote {path}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
