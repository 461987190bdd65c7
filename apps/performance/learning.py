"""Accuracy against the dense all-reduce: real runs of ``apps.train`` under mpirun, several seeds, paired differences.

Every run leaves a record in a folder; runs whose record is complete are not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from apps.environment import environment
from apps.performance.record import footer, parser, publish, table
from apps.performance.runs import SETTINGS, Outcome, Run, run_all
from apps.records import Record

RATES = (*(("momentum", lr) for lr in (0.01, 0.05, 0.2)), *(("adam", lr) for lr in (0.001, 0.003)))
STUDIED = ("dense", "Marsit, K = 100", "Marsit, K = none", "K = 1", '"paper", K = 100')
CASCADING = ("dense", "cascading", "cascading, normalised")
CASCADING_RANKS = (3, 4, 8)
CASCADING_RATE = ("momentum", 0.05)
GRIDS = (("digits", 4), ("fashion-mnist", 4), ("digits", 8))
# Points of accuracy that may be lost to dense.
TARGETS = {"Marsit, K = 100": "≥ −0.5", "Marsit, K = none": "≥ −0.8"}


def study(seeds: int, datasets: Sequence[str]) -> list[Run]:
    """All runs, dataset by dataset and seed by seed: what is stopped early has all methods of the first seeds."""
    runs: list[Run] = []
    for dataset, seed in product(datasets, range(seeds)):
        grids = [ranks for name, ranks in GRIDS if name == dataset]
        for ranks, (optimizer, lr), method in product(grids, RATES, STUDIED):
            if ranks == 4 or method in STUDIED[:4]:  # the literal residual rule is shown at 4 ranks
                runs.append(Run(dataset, ranks, optimizer, lr, method, seed))
        for ranks, method in product(CASCADING_RANKS if dataset == "digits" else (), CASCADING):
            runs.append(Run(dataset, ranks, *CASCADING_RATE, method, seed))
    return list(dict.fromkeys(runs))


def make_record(runs: Sequence[Run], done: dict[Run, Outcome], extra: Sequence[str]) -> Record:
    """Put outcomes into a record."""
    seeds = len({one.seed for one in done})
    settings: dict[str, Any] = {"model": "mlp", "seeds": seeds, "runs": f"{len(done)} of {len(runs)}"}
    settings |= {dataset: f"`{' '.join([*options, *extra])}`" for dataset, options in SETTINGS.items()}
    rows = [asdict(one) | asdict(ended) for one, ended in done.items()]
    return {"part": "learning", "settings": settings, "environment": environment(), "rows": rows}


def render(record: Record) -> str:
    """Markdown: one table per dataset and number of ranks, and one of cascading compression."""
    rows = record["rows"]
    texts = []
    for dataset, ranks in GRIDS:
        lines = [
            (f"{optimizer} {lr:g}", *_cells(rows, STUDIED, dataset=dataset, ranks=ranks, optimizer=optimizer, lr=lr))
            for optimizer, lr in RATES
            if _select(rows, dataset=dataset, ranks=ranks, optimizer=optimizer, lr=lr)
        ]
        if lines:
            found = [_select(rows, dataset=dataset, ranks=ranks, method=method) for method in STUDIED]
            lines.append(("target", *(TARGETS.get(method, "") for method in STUDIED)))
            lines.append(("bits/element", *map(_bits, found)))
            columns = ("optimizer, rate", *STUDIED)
            texts.append(f"**{dataset}, {ranks} ranks**\n\n{table(columns, lines)}")
    optimizer, lr = CASCADING_RATE
    lines = [
        (str(ranks), *_cells(rows, CASCADING, dataset="digits", ranks=ranks, optimizer=optimizer, lr=lr))
        for ranks in CASCADING_RANKS
        if _select(rows, dataset="digits", ranks=ranks, method="cascading")
    ]
    if lines:
        heading = f"**Cascading compression, digits, {optimizer} {lr:g}**"
        texts.append(f"{heading}\n\n{table(('ranks', *CASCADING), lines)}")
    return "\n\n".join(texts or ["No run has ended yet."]) + footer(record)


def _select(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _cells(rows: Sequence[dict[str, Any]], methods: Sequence[str], **where: Any) -> list[str]:
    """Accuracy of the first method, differences of the others to it."""
    reference = {row["seed"]: row["accuracy"] for row in _select(rows, method=methods[0], **where)}
    cells = [accuracy(list(reference.values()))]
    for method in methods[1:]:
        pairs = [(row["accuracy"], reference.get(row["seed"])) for row in _select(rows, method=method, **where)]
        cells.append(difference(pairs))
    return cells


def accuracy(values: Sequence[float | None]) -> str:
    """Mean and standard deviation of the runs that did not diverge, in per cent."""
    return _spread([value for value in values if value is not None], len(values), "")


def difference(pairs: Sequence[tuple[float | None, float | None]]) -> str:
    """Mean and standard deviation of the differences to dense runs of the same seed, in points."""
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    return _spread([one - other for one, other in both], len(pairs), "+")


def _spread(values: Sequence[float], runs: int, sign: str) -> str:
    lost = f"{runs - len(values)} of {runs} diverged" if len(values) < runs else ""
    if not values:
        return lost or "–"
    points = 100 * np.array(values)
    spread = f" ± {points.std(ddof=1):.2f}" if len(values) > 1 else ""
    shown = f"{points.mean():{sign}.2f}{spread}".replace("-", "−")
    return f"{shown} ({lost})" if lost else shown


def _bits(rows: Sequence[dict[str, Any]]) -> str:
    found = [row["bits_per_element"] for row in rows if row["bits_per_element"] is not None]
    return f"{np.mean(found):.2f}" if found else "–"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    made = parser("learning", "Accuracy against the dense all-reduce.")
    made.add_argument("--folder", type=Path, default=Path("runs/learning"), help="of the runs' records")
    made.add_argument("--seeds", type=int, default=5, help="of each combination (default %(default)s)")
    made.add_argument("--datasets", default="digits,fashion-mnist", help="with commas (default %(default)s)")
    made.add_argument("--budget-s", type=float, help="no run starts after so many seconds")
    options = made.parse_args(argv)
    runs, extra = study(options.seeds, options.datasets.split(",")), []
    if options.quick:
        runs = [Run("digits", 4, *CASCADING_RATE, method, 0) for method in ("dense", "Marsit, K = none")]
        extra = ["--epochs", "1", "--warmup-epochs", "0"]
    done = run_all(runs, options.folder.resolve(), extra, options.budget_s)
    publish(make_record(runs, done, extra), render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
