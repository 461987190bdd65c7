"""Functions that run on the ranks: bytes and equality with and without a server, and times of steps and calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from apps.records import Record
from apps.reproduce.doublesqueeze.methods import DS_1BIT, DS_TOPK, MEM_1BIT, MEM_TOPK, formula_bytes, methods
from apps.reproduce.networks import NoiseStep, heavy_tailed
from collectives import Communicator, TopologyName
from mpicomp.cli.timing import alternate, elapsed, gather, slowest, turns

DETERMINISTIC = (DS_1BIT, MEM_1BIT, DS_TOPK, MEM_TOPK)
ENOUGH_S = 4.0  # of the calls of a method after the first, whose memory and connections are new


def vector(n: int, rank: int, step: int) -> NDArray[np.float32]:
    """A made gradient whose common part changes from step to step."""
    return heavy_tailed(n, rank, step, (0, step))


def compare_topologies(topologies: Sequence[str], n: int, steps: int) -> Record:
    """Run some steps of every method over each topology; see `compare_methods`."""
    found = {}
    for topology in topologies:
        # not verified, so that only the methods themselves send bytes
        with Communicator(topology=cast(TopologyName, topology), verify=False) as comm:
            found[topology] = compare_methods(comm, topology, n, steps)
    return found


def compare_methods(comm: Communicator, topology: str, n: int, steps: int) -> Record:
    """Run some steps of every method: digests of results and errors, and bytes of a step, also by the formula."""
    rows = {}
    for name, method in methods().items():
        aggregator: Any = method.start(comm, n)
        digest = hashlib.sha256()
        for step in range(steps):
            digest.update(aggregator.aggregate(vector(n, comm.rank, step)).tobytes())
        sent = gather(comm, np.array([aggregator.traffic.total.bytes_sent / steps]))
        rows[name] = {
            "digest": digest.hexdigest(),
            "errors": _errors(comm, aggregator.state_dict()) if name in DETERMINISTIC else None,
            "bytes": float(sent.sum()),
            "busiest": float(sent.max()),
            "formula": formula_bytes(name, topology, n, comm.size),
        }
    return rows


def _errors(comm: Communicator, state: dict[str, Any]) -> str:
    """Digest of the errors of all workers and owners."""
    workers = gather(comm, state["worker_error"].astype(np.float64))
    owners = gather(comm, state["owner_error"].astype(np.float64)).sum(axis=0)  # 0 where a rank owns nothing
    return hashlib.sha256(workers.tobytes() + owners.tobytes()).hexdigest()


def time_step(hidden: int, batch: int, repeats: int) -> Record:
    """Time a forward and backward pass on all ranks at once, as in training."""
    with Communicator() as comm:
        seconds = alternate({"step": NoiseStep(hidden, batch).gradient}, repeats, 5, comm)["step"]
    return {"median_s": float(np.median(seconds))}


def time_calls(topologies: Sequence[str], lengths: Sequence[int], repeats: int) -> Record:
    """Time a call of every method, by vector length, topology and name; the methods take turns."""
    found: Record = {}
    for n in lengths:
        found[str(n)] = {}
        for topology in topologies:
            with Communicator(topology=cast(TopologyName, topology), timeout=300.0) as comm:
                started = {name: method.start(comm, n) for name, method in methods().items()}
                x, out = np.resize(vector(min(n, 1_000_003), comm.rank, 0), n), np.zeros(n, np.float32)
                found[str(n)][topology] = take_turns(comm, started, x, out, repeats)
    return {"times": found}


def take_turns(
    comm: Communicator, started: dict[str, Any], x: NDArray[np.float32], out: NDArray[np.float32], repeats: int
) -> Record:
    """Median seconds of a call on the slowest rank, and the number of calls, which is smaller for slow methods."""
    calls: dict[str, list[float]] = {name: [] for name in started}
    for name in turns(dict.fromkeys(started, repeats + 1)):
        if sum(calls[name][1:]) <= ENOUGH_S:
            own = elapsed(partial(started[name].aggregate, x, out), comm)
            calls[name].append(float(slowest(np.array([own]), comm)[0]))
    return {name: {"median_s": float(np.median(taken[1:])), "calls": len(taken) - 1} for name, taken in calls.items()}
