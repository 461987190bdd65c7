"""Measure ten calls in flight at once, one call of ten times the length, and ten calls in turn.

``sudo python -m apps.emulator --nodes 4 --rate 1gbit -- python -m apps.performance.in_flight``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import MS, Column, Part, Row, both, make_record, vectors
from apps.records import Record
from collectives import Communicator, Handle, TopologyName
from mpicomp.algorithms import Algorithm
from mpicomp.cli.timing import Calls, alternate

CALLS = 10
METHODS: Mapping[str, Algorithm] = {
    "dense": mpicomp.Dense(),
    "Marsit": mpicomp.Marsit(None),
    "Marsit, one winner": mpicomp.Marsit(None, winners=1),
    "majority vote": mpicomp.MajorityVote(),
}


def measure(n: int, repeats: int, topology: str) -> Record | None:
    """Time vectors of `n` elements in ten parts and as a whole; collective."""
    rows: list[Row] = []
    with Communicator(topology=cast(TopologyName, topology), timeout=300.0) as comm:
        for name, method in METHODS.items():
            timed = alternate(_calls(comm, method, n), repeats, 1, comm)
            rows.append({"method": name, **{way: summary(seconds) for way, seconds in timed.items()}})
        settings = {"n": n, "ranks": comm.size, "repeats": repeats, "topology": topology}
        return None if comm.rank else make_record(rows, **settings)


def _calls(comm: Communicator, method: Algorithm, n: int) -> Calls:
    x, out = vectors(n, comm)
    whole: Any = method.start(comm, n)
    part = n // CALLS
    parts: list[Any] = [method.start(comm, part, vector_id=1 + number) for number in range(CALLS)]
    cuts = [slice(part * number, part * (number + 1)) for number in range(CALLS)]

    def at_once() -> None:
        handles: list[Handle] = [one.begin(x[cut], out[cut]) for one, cut in zip(parts, cuts, strict=True)]
        for handle in handles:
            handle.wait()

    def in_turn() -> None:
        for one, cut in zip(parts, cuts, strict=True):
            one.aggregate(x[cut], out[cut])

    return {"whole": lambda: whole.aggregate(x, out), "at_once": at_once, "in_turn": in_turn}


def _over_whole(way: str) -> Callable[[Row], str]:
    return lambda row: f"{row[way]['median_s'] / row['whole']['median_s']:.2f}"


COLUMNS: Sequence[Column] = (
    ("method", lambda row: row["method"]),
    ("one call, ms", lambda row: both(row["whole"], MS)),
    ("ten at once, ms", lambda row: both(row["at_once"], MS)),
    ("over one call", _over_whole("at_once")),
    ("target", lambda row: "≤ 1.1"),
    ("ten in turn, ms", lambda row: both(row["in_turn"], MS)),
    ("over one call", _over_whole("in_turn")),
)
PART = Part(
    "in_flight",
    "Ten calls in flight at once, beside one call that is ten times as long.",
    measure,
    COLUMNS,
    quick={"n": 10_000, "repeats": 2, "topology": "ring"},
    full={"n": 2_500_000, "repeats": 15, "topology": "ring"},
    ranks=(4,),
)

if __name__ == "__main__":
    sys.exit(PART.main())
