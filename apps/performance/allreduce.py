"""Time all-reduces against MPI_Allreduce of the same vectors: ``mpirun -n 2 python -m apps.performance.allreduce``."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import MS, STAGES, Part, Row, both, format_seconds, get, make_record, vectors
from apps.records import Record
from collectives import Communicator, Traffic
from collectives.execution.traffic import COSTS
from mpicomp.cli.timing import alternate, gather

MPI_ALONE = "MPI_Allreduce"

ONE_BIT = {
    "one-bit ring alone": mpicomp.Marsit(None, compensation=False, global_step=1.0),
    'Marsit, residual "own"': mpicomp.Marsit(None),
    'Marsit, residual "paper"': mpicomp.Marsit(None, residual="paper"),
}

# Speed-up over MPI_Allreduce, by number of ranks.
TARGETS = {
    ("one-bit ring alone", 2): "≥ 3.6",
    ("one-bit ring alone", 4): "≥ 4.3",
    ('Marsit, residual "own"', 2): "≥ 2.5",
    ('Marsit, residual "paper"', 2): "≥ 2.5",
    ("dense ring", 2): "≥ 1.0",
    ("dense ring", 4): "≥ 1.0",
    ("dense auto", 2): "≥ 0.95",
    ("dense auto", 4): "≥ 0.95",
}


def measure(n: int, repeats: int) -> Record | None:
    """Time everything on vectors of `n` elements; collective."""
    with Communicator(topology="ring") as comm, Communicator() as automatic:
        x, out = vectors(n, comm)
        aggregators = {name: options.start(comm, n) for name, options in ONE_BIT.items()}
        calls = {
            MPI_ALONE: partial(comm.mpi_comm.Allreduce, x, out),
            "dense ring": partial(comm.allreduce, x, out=out),
            "dense auto": partial(automatic.allreduce, x, out=out),
            **{name: partial(one.aggregate, x, out) for name, one in aggregators.items()},
        }
        timed = {name: summary(seconds) for name, seconds in alternate(calls, repeats, comm=comm).items()}
        costs = {name: cost(comm, one.traffic.last) for name, one in aggregators.items()}
        rows: list[Row] = [
            {
                "call": name,
                **seconds,
                "speedup": timed[MPI_ALONE]["median_s"] / seconds["median_s"],
                "speedup_of_minima": timed[MPI_ALONE]["min_s"] / seconds["min_s"],
                "target": TARGETS.get((name, comm.size), ""),
                "cost": costs.get(name),
            }
            for name, seconds in timed.items()
        ]
        return None if comm.rank else make_record(rows, ranks=comm.size, n=n, repeats=repeats)


def cost(comm: Communicator, last: Traffic) -> dict[str, float]:
    """Return the stages of one call's time and its bytes, as the mean over ranks; collective."""
    mine = np.array([float(getattr(last, name)) for name in COSTS])
    return dict(zip(COSTS, gather(comm, mine).mean(axis=0).tolist(), strict=True))


def _stages(row: Row) -> str:
    return " + ".join(format_seconds(row["cost"][field], MS) for field in STAGES.values()) if row["cost"] else ""


COLUMNS = (
    ("all-reduce", get("call")),
    ("median (min), ms", lambda row: both(row, MS)),
    ("speed-up", get("speedup", ".2f")),
    ("of minima", get("speedup_of_minima", ".2f")),
    ("target", get("target")),
    (f"{' + '.join(STAGES)}, ms", _stages),
    ("MB sent", lambda row: f"{row['cost']['bytes_sent'] / 1e6:.3g}" if row["cost"] else ""),
)
PART = Part(
    "allreduce",
    "One-bit and dense all-reduces against MPI_Allreduce.",
    measure,
    COLUMNS,
    quick={"n": 100_000, "repeats": 3},
    full={"n": 25_000_000, "repeats": 25},
    ranks=(2, 4),
)

if __name__ == "__main__":
    sys.exit(PART.main())
