"""Timing of an all-reduce and its baseline in turn, and a check of its results by the guarantees of each method.

- All: the same bits on every rank.
- Dense sums and means, and full-precision rounds: within rounding of a sum in float64; 16 bits round twice more.
- Marsit's one-bit rounds: one magnitude everywhere, the global step. Elements keep a sign on which all ranks agree. The
  number of positive elements is within six standard deviations of the sum of vote shares k/M. Per node, the owners of a
  shard check it, and the votes are those of node means.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from collectives import Communicator, Traffic
from collectives.annotations import Array, Doubles, FloatArray
from collectives.consistency.descriptions import gather_texts
from collectives.execution.traffic import COSTS
from mpicomp.algorithms import Aggregator, Algorithm, Dense
from mpicomp.algorithms.marsit import Marsit
from mpicomp.algorithms.per_node import method_of
from mpicomp.cli.bench.vectors import TILE, Call, Vector, Vectors
from mpicomp.cli.timing import Seconds, alternate, gather

DEVIATIONS = 6.0
ROUNDING = {None: (0.0, 0.0), "float16": (2.0**-10, 2.0**-24), "bfloat16": (2.0**-7, 2.0**-133)}
"""Bounds on the error of both roundings for each wire type of `Dense`: relative to a number, and absolute."""


@dataclass(frozen=True)
class Subject:
    """An all-reduce."""

    call: Call  # this alone is timed
    traffic: Traffic  # of all calls so far on this rank
    sums: bool = True  # the result is the sum over ranks, else the mean or an estimate of it
    aggregator: Aggregator | None = None  # of a method


def start_method(algorithm: Algorithm, comm: Communicator, x: Vector, device: str = "cpu") -> Subject:
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
    return start_method(Dense(), comm, vectors.x) if name == "dense" else None


@dataclass(frozen=True)
class Measurement:
    """Times of one vector length."""

    seconds: Seconds  # of each call on the slowest rank
    baseline_seconds: Seconds | None  # None: there is no baseline
    cost: dict[str, float]  # fields of `Traffic` for one call, as the mean over calls and ranks


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


# Check ---------------------------------------------------------------------------------------------------------------


def checked_call(comm: Communicator, subject: Subject, vectors: Vectors) -> str:
    """Make one call; return the error of its result, the same on every rank, or ""; collective."""
    aggregator, problem, x, out = subject.aggregator, "", vectors.x, vectors.out
    method = None if aggregator is None else method_of(aggregator.algorithm)
    per_node = aggregator is not None and method is not aggregator.algorithm
    is_exact = per_node and len(comm.layout.sizes) == 1 < comm.size  # one rank runs the method itself
    if aggregator is not None and isinstance(method, Marsit) and not is_exact:
        problem = _marsit(comm, aggregator, method, vectors)
    else:
        vectors.take(subject.call)
        if method is None or isinstance(method, Dense) or is_exact:
            wire = method.wire if isinstance(method, Dense) else None
            problem = _mean(comm, x, out, 1 if subject.sums else comm.size, wire)
    digest = hashlib.blake2b(out.view(np.uint8).data, digest_size=8).hexdigest()
    digests = gather_texts(comm.mpi_comm, digest, comm.timeout)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        return f"rank {odd[0]} of {comm.size} has another result than rank 0"
    return next(filter(None, gather_texts(comm.mpi_comm, problem, comm.timeout)), "")  # ranks may check parts


def _sums(comm: Communicator, rows: Doubles) -> Doubles:
    """Return the sum over ranks, by MPI."""
    total = np.empty_like(rows)
    comm.wait(comm.mpi_comm.Iallreduce(rows, total), lambda: f"rank {comm.rank} of {comm.size}: the check does not end")
    return total


def _tiles(n: int) -> list[slice]:
    return [slice(start, min(start + TILE, n)) for start in range(0, n, TILE)]


def _mean(comm: Communicator, values: FloatArray, out: FloatArray, divisor: int, wire: str | None = None) -> str:
    """Compare `out` with the sum of the ranks' values, divided; `wire` is the type that they were rounded to."""
    # a result of 16 bits is rounded from a float32 sum; every addition rounds once
    unit, final = (float(np.finfo(dtype).eps) for dtype in (values.dtype, out.dtype))
    unit = min(unit, float(np.finfo(np.float32).eps))
    relative, least = ROUNDING[wire]
    relative, least = 1.01 * relative, least + float(np.finfo(out.dtype).smallest_subnormal)
    for tile in _tiles(out.size):
        part = values[tile].astype(np.float64)
        exact, magnitude = _sums(comm, np.stack([part, np.abs(part)])) / divisor
        error = np.abs(out[tile].astype(np.float64) - exact)
        allowed = (2 * (comm.size + 1) * unit + relative) * magnitude + final * np.abs(exact) + least
        wrong = np.flatnonzero(~(error <= allowed))
        if wrong.size:
            i = int(wrong[0])
            return f"element {tile.start + i} is {out[tile][i]}, the exact result is {exact[i]:.9g}"
    return ""


def _node_sums(comm: Communicator, aggregator: Aggregator, x: FloatArray) -> FloatArray:
    """Return this rank's shard of the sum of its node, added in the order of local ranks, with the weight of a node."""
    local, own = comm.nodes.local, aggregator.feedback.own
    compute = np.float64 if x.dtype == np.float64 else np.float32
    sums: FloatArray = np.empty(len(own), compute)
    for tile in _tiles(x.size):
        rows = gather(local, x[tile].astype(np.float64)).astype(compute)  # exact: both types have fewer bits
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        first, stop = max(tile.start, own.start), min(tile.stop, own.stop)
        if first < stop:
            sums[first - own.start : stop - own.start] = total[first - tile.start : stop - tile.start]
    sums /= comm.size / len(comm.layout.sizes)
    return sums


def _marsit(comm: Communicator, aggregator: Aggregator, options: Any, vectors: Vectors) -> str:
    """Make one call of Marsit, between all ranks or between nodes, and check it with the residual from before."""
    x, out = vectors.x, vectors.out
    if aggregator.algorithm is not options:
        x, own = _node_sums(comm, aggregator, x), aggregator.feedback.own
        comm, out = comm.nodes.across, out[own.start : own.stop]
    residual, gamma = aggregator.feedback.copy_settled_residual(), aggregator.feedback.size.gamma
    every = options.full_precision_every
    dense = every is not None and aggregator.step % every == 0
    vectors.take(aggregator.aggregate)
    compute = np.float64 if x.dtype == np.float64 else np.float32
    if not x.size:  # a node has more ranks than there are shards
        return ""
    signed = x.astype(compute) if residual is None else x.astype(compute) + residual
    if not dense:
        step = options.global_step
        if step == "auto":
            # the vector is the same in every call, so the running mean of its magnitude is that magnitude
            magnitudes = np.array([np.abs(x, dtype=compute).sum(dtype=np.float64)])
            step = gamma * float(_sums(comm, magnitudes)[0]) / comm.size / x.size
        return _votes(comm, signed, residual is not None, out, step, options.winners == 2)
    after = aggregator.feedback.copy_settled_residual()
    left = float(_sums(comm, np.array([0.0 if after is None else np.abs(after).max()]))[0])
    if left:
        return "a full-precision round left a residual"
    return _mean(comm, signed, out, comm.size)


def _votes(
    comm: Communicator, signed: FloatArray, zero_is_positive: bool, out: FloatArray, step: float, zeros: bool
) -> str:
    """Check a one-bit result by the ranks' votes. With `zeros` it is 0 where two winners disagree."""
    size = comm.size
    tolerance = 1e-5 + float(np.finfo(out.dtype).eps)
    magnitude = float(abs(out[np.argmax(out != 0)]))
    if not (zeros and magnitude == 0) and not math.isclose(magnitude, step, rel_tol=tolerance):
        return f"the result's magnitude is {magnitude:.9g}, the global step is {step:.9g}"
    positive, expected, variance = 0.0, 0.0, 0.0
    for tile in _tiles(out.size):
        part = signed[tile]
        # without a residual the sign of 0 alternates: half a vote for each sign
        votes = _sums(comm, np.stack([part >= 0 if zero_is_positive else part > 0, part < 0]).astype(np.float64))
        positives, negatives = out[tile] > 0, out[tile] < 0
        if np.any((np.abs(out[tile]) != out.dtype.type(magnitude)) & (positives | negatives | (not zeros))):
            return f"elements {tile.start} to {tile.stop - 1} do not all have the magnitude {magnitude:.9g}"
        flipped = np.flatnonzero(((votes[0] == size) & ~positives) | ((votes[1] == size) & ~negatives))
        if flipped.size:
            return f"element {tile.start + int(flipped[0])} has another sign than all ranks voted for"
        share = (votes[0] + (size - votes[0] - votes[1]) / 2) / size
        positive += (out[tile].size + np.count_nonzero(positives) - np.count_nonzero(negatives)) / 2
        expected += float(share.sum())
        variance += float((share * (1 - share)).sum())
    if abs(positive - expected) > DEVIATIONS * math.sqrt(variance) + 1:
        around = f"{expected:.0f} +- {math.sqrt(variance):.0f}"
        return f"{positive:.0f} elements are positive, the votes lead to expect {around}"
    return ""
