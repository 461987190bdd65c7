"""Part of a one-bit ring's computing that is hidden behind the wire, at several rates.

*Wire* runs the same program with the same pieces and buffers, and computes nothing. *Compute* calls the same kernels on
the same pieces, on all ranks at once, and sends nothing. *Both* is the real call. All three take turns. *Moving* is the
processor time of the wire alone where ranks that wait sleep, and do not poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from apps.environment import environment
from apps.launch import JobFailed
from apps.performance.cluster.driver import ClusterJob, ClusterMeasurement
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.prepared import ONE_BIT
from apps.performance.cluster.ratios import find_balance
from apps.performance.cluster.records import merge_environments
from apps.performance.cluster.tables import overlap_table
from apps.performance.cluster.targets import render_overlaps
from apps.performance.cluster.vectors import make_vectors
from apps.performance.durations import elapsed_and_processor
from apps.records import Record, read_record
from collectives import Communicator, Traffic
from collectives.execution.call import Call
from collectives.execution.pipelined import execute
from collectives.execution.program import Message
from collectives.execution.requests import Cache
from collectives.progress.polling import rest_by
from mpicomp.cli.timing import alternate, gather
from mpicomp.codecs.sign import Sign
from mpicomp.feedback.host_signs import STREAMING_ELEMENTS
from mpicomp.feedback.rounds import Round
from mpicomp.kernels.cpu.sign import pack, unpack
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.sign_merge import SignMerge, SignPayload

NAP_S = 1e-4
N, REPEATS, JOBS = 25_000_000, 25, 5
CLUSTERS = (
    Cluster(4, "1gbit"),
    *(Cluster(2, rate) for rate in ("500mbit", "1gbit", "2gbit", "4gbit", "8gbit", "none")),
)


def overlap(wire_s: float, compute_s: float, both_s: float) -> float:
    """The part of the shorter of the two that is hidden: 1 at best, 0 where nothing is, negative where both disturb."""
    return (wire_s + compute_s - both_s) / min(wire_s, compute_s)


class EmptyPayload:
    """A payload of the same messages with nothing to compute. Parameters: the one whose buffers it sends."""

    def __init__(self, real: SignPayload) -> None:
        self.receive_buffers, self.brief = real.receive_buffers, real.brief
        self.outgoing, self.incoming, self.replacing = real.outgoing, real.incoming, real.replacing

    def encode(self, piece: int) -> None:
        """Do nothing."""

    def prepare(self, message: Message, buffer: int) -> None:
        """Do nothing."""

    def merge(self, message: Message, buffer: int) -> None:
        """Do nothing."""

    def finish(self, piece: int) -> None:
        """Do nothing."""


class Kernels:
    """The computing of a one-bit ring from `x` to `out`, piece by piece."""

    def __init__(self, comm: Communicator, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        self._x, self._out = x, out.view(np.uint32)
        self._streaming = x.size >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0
        self._ends = np.array([1, -1], np.float32).view(np.uint32)
        reducer = SignMerge(comm, x.size, Sign().bind("cpu", Stream(0, 0, "merge")), 0)  # code of the method itself
        self.program, self.payload = reducer.program, reducer.payload
        self.payload.begin(0, Round(self.encode, self.finish))

    def encode(self, piece: int) -> None:
        """Signs of a piece to bits."""
        cut, zero = self.program.pieces[piece], np.float32(0)
        bits = self.payload.bits[cut.start // 64 : -(-cut.stop // 64)]
        pack(self._x[cut.start : cut.stop], bits, True, zero, np.nextafter(zero, np.float32(1)))

    def finish(self, piece: int) -> None:
        """Bits of a piece to +-1."""
        cut = self.program.pieces[piece]
        bits = self.payload.bits[cut.start // 64 : -(-cut.stop // 64)]
        unpack(bits, self._ends[0], self._ends[1], self._streaming, self._out[cut.start : cut.stop])

    def __call__(self) -> None:
        """All of it, with nothing sent."""
        for piece in self.program.encode_order:
            self.encode(piece)
        for message in self.program.recvs:
            if message.held_weight:
                self.payload.prepare(message, 0)
                self.payload.merge(message, 0)
        for piece in range(len(self.program.pieces)):
            self.finish(piece)


def measure_here(comm: Communicator, n: int, repeats: int) -> Record:
    """Time wire, compute and both; collective.

    Returns
    -------
    dict
        Times of the slowest rank of each call, medians, the overlap of the medians, and ``exposed_s``: what the real
        call waited with nothing to do, mean over ranks and calls; and ``moving_s``, the median over calls of the mean
        over ranks.
    """
    x, out = make_vectors(n, comm.rank)
    kernels, tag = Kernels(comm, x, out), comm.fixed_tag()
    empty, requests = EmptyPayload(kernels.payload), Cache()
    aggregator = ONE_BIT.start(comm, n)

    def wire() -> None:
        call = Call(comm, lambda: "the wire alone")
        comm.run(call, execute(call, kernels.program, empty, tag, Traffic(), None, requests))

    calls: dict[str, Callable[[], object]] = {
        "wire": wire,
        "compute": kernels,
        "both": lambda: aggregator.aggregate(x, out),
    }
    timed = alternate(calls, repeats, comm=comm)
    before = rest_by(lambda: time.sleep(NAP_S))
    try:
        moving = np.array([elapsed_and_processor(calls["wire"], comm)[1] for _ in range(repeats)])
    finally:
        rest_by(before)
    total = aggregator.traffic.total
    exposed = float(gather(comm, np.array([total.seconds_waiting / total.calls])).mean())
    medians = {name: float(np.median(seconds)) for name, seconds in timed.items()}
    return {
        "part": "overlap",
        "n": n,
        "environment": environment(),
        "times_s": {name: seconds.tolist() for name, seconds in timed.items()},
        **{f"{name}_s": median for name, median in medians.items()},
        "overlap": overlap(medians["wire"], medians["compute"], medians["both"]),
        "exposed_s": exposed,
        "moving_s": float(np.median(gather(comm, moving).mean(axis=0))),
        "bytes_sent": aggregator.traffic.last.bytes_sent,
    }


def jobs(records: Path) -> Iterator[ClusterJob]:
    """Let the clusters take turns, a job each; then measure where wire and computing take equally long."""
    names = {cluster: f"overlap-{cluster.name}" for cluster in CLUSTERS}
    yield from _turns(names)
    paths = [records / "overlap" / f"{name}.json" for cluster, name in names.items() if cluster.nodes == 2]
    mbit = balance([read_record(path) for path in paths if path.exists()])
    if mbit is None:
        raise JobFailed("no rate found at which wire and computing take equally long")
    yield from _turns({Cluster(2, f"{mbit}mbit"): "overlap-balanced"})


def _turns(names: Mapping[Cluster, str]) -> Iterator[ClusterJob]:
    for turn, (cluster, name) in product(range(JOBS), names.items()):
        yield ClusterJob(cluster, name, {"n": N, "repeats": REPEATS}, turn=turn)


def merge_jobs(jobs: Sequence[Record]) -> Record:
    """One record of several jobs on links of the same rate: medians over jobs, and each job's overlap."""
    names = ("wire_s", "compute_s", "both_s", "overlap", "exposed_s", "moving_s")
    links = [
        {**first, "bits_per_s": median(link["bits_per_s"] for link in (first, *others))}
        for first, *others in zip(*(job["links"] for job in jobs), strict=True)
    ]
    return {
        **jobs[0],
        **{name: median(job[name] for job in jobs) for name in names},
        "overlaps": [job["overlap"] for job in jobs],
        "times_s": {name: [job["times_s"][name] for job in jobs] for name in jobs[0]["times_s"]},
        "links": links,
        "environment": merge_environments(jobs),
    }


def balance(records: Sequence[Record]) -> int | None:
    """The rate to ask for, in Mbit/s, so that wire and computing take equally long."""
    found = find_balance(records)
    return None if found is None else round(found / 0.956 / 1e6)


def render(records: Sequence[Record]) -> str:
    """A table of the measurements, and one of their targets."""
    return f"{overlap_table(records)}\n\n{render_overlaps(records)}"


MEASUREMENT = ClusterMeasurement("overlap", jobs, measure_here, render, JOBS, merge_jobs)
