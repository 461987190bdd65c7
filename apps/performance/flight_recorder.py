"""Measure the cost of the flight recorder: calls with and without it, alternating.

``mpirun -n 2 python -m apps.performance.flight_recorder``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import US, Column, Part, Row, both, make_record, vectors
from apps.records import Record
from collectives import Communicator
from collectives.execution.call import Call
from collectives.execution.observer import History
from mpicomp.cli.timing import Calls, alternate

SMALL, LONG = 1000, 1_000_000


def measure(repeats: int) -> Record | None:
    """Time calls with the recorder and without it; collective."""
    rows: list[Row] = []
    with Communicator() as comm:
        for name, n, rounds in (("allreduce", SMALL, 10), ("allreduce", LONG, 1), ("Marsit", LONG, 1)):
            x, out = vectors(n, comm)
            call = partial(comm.allreduce, x, out=out)
            if name == "Marsit":
                call = partial(mpicomp.Marsit(None).start(comm, n).aggregate, x, out)
            calls: Calls = {
                "with": partial(_make, comm, comm.calls.history, call),
                "without": partial(_make, comm, _Nothing(), call),
            }
            timed = {one: summary(seconds) for one, seconds in alternate(calls, repeats * rounds, 20, comm).items()}
            rows.append({"call": name, "count": n, **timed})
        return None if comm.rank else make_record(rows, ranks=comm.size, repeats=repeats)


class _Nothing:
    """History that keeps nothing."""

    def begin(self, call: Call) -> None:
        pass

    def compare(self, call: Call) -> None:
        pass

    def end(self, call: Call) -> None:
        pass

    def explain(self, error: BaseException, missing: Sequence[int] = ()) -> str:
        return ""


def _make(comm: Communicator, history: History, call: Callable[[], object]) -> None:
    comm.calls.history = history
    call()


def _format_added(row: Row) -> str:
    added = row["with"]["median_s"] - row["without"]["median_s"]
    return f"{added / US:.2f} ({added / row['without']['median_s']:.2%})"


COLUMNS: Sequence[Column] = (
    ("call", lambda row: row["call"]),
    ("elements", lambda row: f"{row['count']:,}"),
    ("with, µs", lambda row: both(row["with"], US)),
    ("without, µs", lambda row: both(row["without"], US)),
    ("added to the median, µs", _format_added),
)
PART = Part(
    "flight_recorder",
    "Cost of the flight recorder.",
    measure,
    COLUMNS,
    quick={"repeats": 20},
    full={"repeats": 2000},
    ranks=(2,),
)

if __name__ == "__main__":
    sys.exit(PART.main())
