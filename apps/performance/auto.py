"""Measure the cost of a call of Auto once it has chosen, next to both of its candidates.

``mpirun -n 2 python -m apps.performance.auto``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import mpicomp
from apps.performance.part import US, Column, Part, Row, get, in_unit, make_record, vectors
from apps.records import Record
from collectives import Communicator
from mpicomp.auto.trials import Side, Stage
from mpicomp.cli.timing import alternate

COUNTS = (256, 4096, 65_536, 1 << 20, 5 << 20, 25_000_000)
WARM_UPS = 5
MOST_TRIED = 1000  # steps in which it must have chosen


def measure(counts: Sequence[int], elements: float) -> Record | None:
    """Time every vector length, so often that about so many elements are reduced; collective."""
    rows: list[Row] = []
    with Communicator() as comm:
        for n in counts:
            x, out = vectors(n, comm)
            methods = {"dense": mpicomp.Dense(), "marsit": mpicomp.Marsit(), "auto": mpicomp.Auto()}
            methods["again"] = mpicomp.Dense()  # by which the noise is seen
            started = {name: method.start(comm, n) for name, method in methods.items()}
            tried = 0
            while plan_of(started["auto"]).stage is not Stage.CHOSEN and tried < MOST_TRIED:
                started["auto"].aggregate(x, out)
                tried += 1
            repeats = int(min(3000, max(15, elements / n)))
            calls = {name: partial(one.aggregate, x, out) for name, one in started.items()}
            seconds = alternate(calls, repeats, WARM_UPS, comm)
            best = min(("dense", "marsit"), key=lambda name: np.median(seconds[name]))
            chosen = "marsit" if plan_of(started["auto"]).side is Side.COMPRESSED else "dense"
            ratios = {"of_best": ("auto", best), "of_dense": ("auto", "dense"), "noise": ("again", "dense")}
            rows.append(
                {"count": n, "chosen": chosen, "tried": tried, "repeats": repeats}
                | {f"{name}_s": float(np.median(one)) for name, one in seconds.items()}
                | {name: _ratio(seconds[one], seconds[other]) for name, (one, other) in ratios.items()}
            )
        return None if comm.rank else make_record(rows, ranks=comm.size)


def plan_of(aggregator: Any) -> Any:
    """Return the plan of an aggregator of Auto."""
    return aggregator.driver.plan


def _ratio(some: Any, others: Any) -> float:
    """Median over the rounds, in each of which both were timed, so that the machine's moods meet both."""
    return float(np.median(some / others))


COLUMNS: Sequence[Column] = (
    ("elements", lambda row: f"{row['count']:,}"),
    ("dense, µs", in_unit("dense_s", US)),
    ("Marsit, µs", in_unit("marsit_s", US)),
    ("Auto, µs", in_unit("auto_s", US)),
    ("chosen", get("chosen")),
    ("after steps", get("tried")),
    ("of the better one", get("of_best", ".3f")),
    ("of dense", get("of_dense", ".3f")),
    ("another dense, of dense", get("noise", ".3f")),
)
PART = Part(
    "auto",
    "What a call of Auto costs once it has chosen.",
    measure,
    COLUMNS,
    quick={"counts": COUNTS[:2], "elements": 1e4},
    full={"counts": COUNTS, "elements": 5e8},
    ranks=(2, 4),
)

if __name__ == "__main__":
    sys.exit(PART.main())
