"""``sudo python -m apps.performance.cluster``: make the missing measurements, then write tables and plots."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from apps.appendices import publish
from apps.launch import PROJECT, exit_on_signals
from apps.performance.cluster import picture_data, predicted, targets, training
from apps.performance.cluster.driver import FAILURES, Limits, has_mpich, log, measure_cells, measure_missing
from apps.performance.cluster.grid import (
    BUDGET_S,
    RATES,
    SIZES,
    TARGET_BUDGET_S,
    TWO_LEVEL,
    Cell,
    by_cluster,
    default_plan,
    product,
)
from apps.performance.cluster.measurements import MEASUREMENTS
from apps.performance.cluster.records import read
from apps.performance.cluster.tables import NOTHING, tables
from apps.performance.part import choose_from

FOLDER = PROJECT / "runs" / "performance" / "cluster"
DOCUMENT, FIGURES = PROJECT / "docs" / "performance-tables.md", PROJECT / "docs" / "figures"
CAPTIONS = {
    "cluster-time": "Lines: time of an all-reduce against the size of the vector, a panel for each rate of the links",
    "cluster-speedup": "Lines: how many times as fast as the best dense one Marsit's all-reduce is, against the rate "
    "of the links, for three sizes of vectors, below the limit of 32 times",
    "cluster-stages": "Bars: parts of a call that encode, merge, decode, wait and do everything else, at each rate",
    "cluster-overlap": "Lines: time of sending alone, computing alone and both at once, against the rate of the links",
    "cluster-methods": "Marks: time of the all-reduce of each method at two rates of the links",
    "cluster-backward": "Bars: part of a step that communication during backward saves, by method and rate",
    "cluster-training": "Bars: training seconds to the same accuracy by method, at two rates of the links",
}
"""What the figures show, for readers who do not see them."""
PARTS = ("grid", *MEASUREMENTS, "training", "tables")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where something was not measured."""
    parser = _parser()
    options = parser.parse_args(argv)
    exit_on_signals()
    try:
        cells = plan(options)
    except ValueError as error:
        parser.error(str(error))
    folder = options.json_dir or FOLDER
    failed = grid(cells, folder, options) if "grid" in options.only else []
    for name, measurement in MEASUREMENTS.items():
        failed += measure_missing(measurement, folder, options.fresh) if name in options.only else []
    failed += training.run(folder / "training", options.fresh) if "training" in options.only else []
    if "tables" in options.only:
        write(folder, options)
    for text in failed:
        print(f"error: {text}", file=sys.stderr)
    return 1 if failed else 0


def plan(options: argparse.Namespace) -> list[Cell]:
    """Return the requested cells; ValueError if there is no such cell."""
    if options.nodes is None and options.rates is None and options.sizes is None:
        return default_plan()
    nodes = [int(count) for count in (options.nodes or "4").split(",")]
    return product(nodes, (options.rates or ",".join(RATES)).split(","), (options.sizes or ",".join(SIZES)).split(","))


def grid(cells: Sequence[Cell], folder: Path, options: argparse.Namespace) -> list[str]:
    """Measure cells cluster by cluster; returns the failures."""
    mpich = has_mpich() and not options.no_mpich
    if not mpich:
        log("without MPICH (`make test-mpich` sets it up)")
    limits = Limits(options.budget_s, options.longest_s)
    failed = []
    for cluster, its_cells in by_cluster(cells).items():
        missing = [cell for cell in its_cells if options.fresh or not (folder / f"{cell.name}.json").exists()]
        if not missing:
            continue
        sizes = " ".join(cell.name.rpartition("-")[2] for cell in missing)
        log(f"{cluster.nodes} nodes, {cluster.links}: {sizes}")
        start = time.monotonic()
        try:
            measure_cells(cluster, missing, folder, limits, mpich, options.fresh)
        except FAILURES as error:
            failed.append(f"{cluster.name}: {error}")
            log(failed[-1])
        log(f"{cluster.name} took {time.monotonic() - start:.0f} s")
    return failed


def write(folder: Path, options: argparse.Namespace) -> None:
    """Tables and plots of all records there are; parts without records stay in the document as they are."""
    records, trained = read(folder, "cluster"), training.records(folder / "training")
    found = {name: read(folder / name, name) for name in MEASUREMENTS}
    document = options.docs or (None if options.json_dir else DOCUMENT)
    folder_of_figures = options.figures or (folder if options.json_dir else FIGURES)
    parts = picture_data.condense(
        records, found["overlap"], found["methods"], found["backward"], training.summaries(trained)
    )
    if parts:
        picture_data.update(folder_of_figures / "data" / picture_data.NAME, parts)
    drawn = {path.stem: path for path in picture_data.draw_parts(parts, folder_of_figures)}
    for path in drawn.values():
        log(f"wrote {path}")
    bodies = tables(records)
    bodies["cluster-training"] = training.render(trained)
    bodies["cluster-predictions"] = predicted.render(records)
    bodies["cluster-targets"] = targets.render(records)
    bodies |= {f"cluster-{name}": one.render(found[name]) for name, one in MEASUREMENTS.items()}
    if document is None:
        for name, body in bodies.items():
            print(f"\n## {name}\n\n{body}", flush=True)
        return
    own = {"cluster-training", "cluster-methods", "cluster-backward"}  # figures that stand below their tables
    for name in own & drawn.keys():
        bodies[name] += "\n\n" + figures([drawn[name]], document.parent)
    bodies["cluster-figures"] = figures([drawn[name] for name in drawn if name not in own], document.parent)
    made_of: dict[str, list[Sequence[object]]] = {
        "cluster-figures": [records, found["overlap"]],
        "cluster-training": [parts.get("training", ())],
        **{f"cluster-{name}": [mine] for name, mine in found.items()},
    }
    for name, body in bodies.items():
        if body != NOTHING and all(made_of.get(name, [records])):
            publish(document, name, body)
        else:
            log(f"{name} stays as it is: not all it is made of has been measured here")


def figures(paths: Sequence[Path], base: Path) -> str:
    """Markdown that shows plots in a document that lies in `base`."""
    shown = [
        f"![{CAPTIONS.get(path.stem, path.stem)}]({Path(os.path.relpath(path, base)).as_posix()})" for path in paths
    ]
    return "\n\n".join(shown) or NOTHING


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    parser = argparse.ArgumentParser(
        prog="python -m apps.performance.cluster",
        description="All-reduces compared on an emulated cluster: ours, MPI's, its tuned algorithms', Gloo's. "
        "Needs root. Without options it takes about three hours.",
    )
    parser.add_argument("--nodes", metavar="N,N", help="numbers of hosts")
    parser.add_argument("--rates", metavar="RATE,RATE", help=f"of links; {TWO_LEVEL}: two groups, rate between them")
    parser.add_argument("--sizes", metavar="SIZE,SIZE", help=f"of the vectors, as in {','.join(SIZES)}")
    parser.add_argument(
        "--budget-s",
        type=float,
        help=f"timed calls of a cell ({BUDGET_S:g}; {TARGET_BUDGET_S:g} where it has targets)",
    )
    parser.add_argument(
        "--longest-s",
        type=float,
        default=limits.longest_s,
        help="leave out implementations that take longer a call (%(default)s)",
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is measured already")
    parser.add_argument("--no-mpich", action="store_true", help="no jobs with MPICH in between")
    parser.add_argument("--only", type=choose_from(PARTS), default=PARTS, metavar="PART,PART", help=", ".join(PARTS))
    parser.add_argument("--json-dir", type=Path, metavar="DIR", help="of the records (runs/performance/cluster)")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="where the tables go (docs/performance-tables.md)")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="where the plots go (docs/figures)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
