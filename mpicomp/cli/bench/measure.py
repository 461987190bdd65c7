"""Timing of an all-reduce and its baseline in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from collectives import Communicator, Traffic
from collectives.annotations import Array
from collectives.trace.traffic import COSTS
from mpicomp.algorithms import Aggregator, Algorithm, Dense
from mpicomp.cli.bench.vectors import Call, Vector, Vectors
from mpicomp.cli.timing import Seconds, alternate, gather


@dataclass(frozen=True)
class Subject:
    """An all-reduce.

    Attributes
    ----------
    call : callable
        Reduces its first argument into the second; this alone is timed.
    traffic : Traffic
        Cost of all calls so far on this rank.
    sums : bool
        Whether the result is the sum over ranks, else the mean or an estimate of it.
    aggregator : Aggregator or None
        The aggregator of a method.
    """

    call: Call
    traffic: Traffic
    sums: bool = True
    aggregator: Aggregator | None = None


def aggregated(algorithm: Algorithm, comm: Communicator, x: Vector, device: str = "cpu") -> Subject:
    """Start a method for vectors like `x`; `device` as in `Algorithm.start`."""
    aggregator = algorithm.start(comm, x.size, dtype=x.dtype.name, device=device)
    return Subject(aggregator.aggregate, aggregator.traffic.total, False, aggregator)


def allreduce(comm: Communicator) -> Subject:
    """Return `Communicator.allreduce`, the dense sum."""
    return Subject(lambda x, out: comm.allreduce(x, "sum", out), comm.traffic)


def mpi_allreduce(comm: Communicator, x: Vector) -> Subject:
    """Return MPI's own blocking all-reduce; float16 vectors as float32, MPI's smallest type."""
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
    """Return the all-reduce of ``--baseline`` for vectors in this memory; None for "none"."""
    if name == "mpi":
        subject = mpi_allreduce(comm, vectors.x)
        return replace(subject, call=vectors.through_host(subject.call))
    return aggregated(Dense(), comm, vectors.x) if name == "dense" else None


@dataclass(frozen=True)
class Measurement:
    """Times of one vector length.

    Attributes
    ----------
    seconds, baseline_seconds : float64[repeats]
        Time of each call on the slowest rank; None without a baseline.
    cost : dict
        Fields of `Traffic` for one call, as the mean over calls and ranks.
    """

    seconds: Seconds
    baseline_seconds: Seconds | None
    cost: dict[str, float]


def measure(
    comm: Communicator, subject: Subject, other: Subject | None, x: Array, out: Array, repeats: int, warmup: int
) -> Measurement:
    """Time a subject and its baseline, if any, in turn, each call behind a barrier; collective."""
    calls = {"subject": partial(subject.call, x, out)}
    if other is not None:
        calls["baseline"] = partial(other.call, x, out)
    alternate(calls, warmup, 0, comm)
    before = replace(subject.traffic)
    timed = alternate(calls, repeats, 0, comm)
    spent = [(getattr(subject.traffic, name) - getattr(before, name)) / repeats for name in COSTS]
    cost = dict(zip(COSTS, gather(comm, np.array(spent, np.float64)).mean(axis=0).tolist(), strict=True))
    return Measurement(timed["subject"], timed.get("baseline"), cost)
