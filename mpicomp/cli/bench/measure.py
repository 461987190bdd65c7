"""What is timed, the baseline that it is timed against in turn, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from collectives import Communicator, Traffic
from collectives.trace.traffic import COSTS
from mpicomp.algorithms import Aggregator, Algorithm, Dense
from mpicomp.cli.bench.vectors import Call, Vector, Vectors
from mpicomp.cli.timing import Seconds, alternate, gather


@dataclass(frozen=True)
class Subject:
    """One way to reduce a vector."""

    call: Call  # from the first into the second; this alone is timed
    traffic: Traffic  # what all calls so far have cost this rank
    sums: bool = True  # the result is the sum over ranks; else it is, or stands for, the mean
    aggregator: Aggregator | None = None  # of a method


def aggregated(algorithm: Algorithm, comm: Communicator, x: Vector, device: str = "cpu") -> Subject:
    """A method of `mpicomp.ALGORITHMS` for such vectors; `device` as in `Algorithm.start`."""
    aggregator = algorithm.start(comm, x.size, dtype=x.dtype.name, device=device)
    return Subject(aggregator.aggregate, aggregator.traffic.total, False, aggregator)


def allreduce(comm: Communicator) -> Subject:
    """`Communicator.allreduce`, the dense sum as a user calls it."""
    return Subject(lambda x, out: comm.allreduce(x, "sum", out), comm.traffic)


def mpi_allreduce(comm: Communicator, x: Vector) -> Subject:
    """MPI's own, blocking all-reduce with nothing around it; of float16 vectors as float32, MPI's smallest."""
    mpi_comm, trace = comm.mpi_comm, comm.trace
    wide = (x.astype(np.float32), np.empty(x.size, np.float32)) if x.dtype == np.float16 else None

    def call(x: Vector, out: Vector) -> None:
        source, target = (x, out) if wide is None else wide
        if trace is None:
            mpi_comm.Allreduce(source, target)
        else:
            with trace.span("call", "MPI_Allreduce", bytes=source.nbytes):
                mpi_comm.Allreduce(source, target)

    return Subject(call, Traffic())


def baseline(name: str, comm: Communicator, vectors: Vectors) -> Subject | None:
    """What ``--baseline`` names, as a user would call it with vectors where these are; None: nothing."""
    if name == "mpi":
        subject = mpi_allreduce(comm, vectors.x)
        return replace(subject, call=vectors.through_host(subject.call))
    return aggregated(Dense(), comm, vectors.x) if name == "dense" else None


@dataclass(frozen=True)
class Measurement:
    """One vector length."""

    seconds: Seconds  # of each timed call, on the slowest rank
    baseline_seconds: Seconds | None
    cost: dict[str, float]  # fields of `Traffic` for one call, as the mean over calls and ranks


def measure(
    comm: Communicator, subject: Subject, other: Subject | None, x: Any, out: Any, repeats: int, warmup: int
) -> Measurement:
    """Time a subject and its baseline, if there is one, in turn, each call behind a barrier of its own; collective.

    Both overwrite `out`.
    """
    calls = {"subject": partial(subject.call, x, out)}
    if other is not None:
        calls["baseline"] = partial(other.call, x, out)
    alternate(calls, warmup, 0, comm)
    before = replace(subject.traffic)
    timed = alternate(calls, repeats, 0, comm)
    spent = [(getattr(subject.traffic, name) - getattr(before, name)) / repeats for name in COSTS]
    cost = dict(zip(COSTS, gather(comm, np.array(spent, np.float64)).mean(axis=0).tolist(), strict=True))
    return Measurement(timed["subject"], timed.get("baseline"), cost)
