"""Functions that run on the ranks for the figures of Marsit: bytes for each K, and the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import numpy as np

from apps.records import Record
from apps.reproduce.networks import NoiseStep
from collectives import Communicator, TopologyName, Traffic
from mpicomp import SSDM, Dense, EFSignSGD, MajorityVote, Marsit
from mpicomp.algorithms import Algorithm
from mpicomp.cli.timing import gather, spin_barrier, turns

WARMUP = 2  # calls that compile kernels and open connections
TIMED: dict[str, Algorithm] = {
    "PSGD": Dense(),
    "signSGD": MajorityVote(),
    "EF-signSGD": EFSignSGD(),
    "SSDM": SSDM(),
    "Marsit": Marsit(None),
}


def count_bits(n: int, steps: int, periods: Sequence[int | None]) -> Record:
    """Bits per element and phase for each K; see `bits_sent`."""
    with Communicator(topology="ring", timeout=300.0) as comm:
        return {"bits": bits_sent(comm, n, steps, periods)}


def bits_sent(comm: Communicator, n: int, steps: int, periods: Sequence[int | None]) -> list[float]:
    """Bits per element and phase for each K, mean over ranks and rounds; collective."""
    x = np.random.default_rng(comm.rank).standard_normal(n, np.float32)
    out, phases, bits = np.zeros_like(x), 2 * (comm.size - 1) / comm.size, []
    for period in periods:
        aggregator = Marsit(period).start(comm, n)
        for _ in range(steps):
            aggregator.aggregate(x, out)
        sent = gather(comm, np.array([float(aggregator.traffic.total.bytes_sent)])).mean()
        bits.append(float(8 * sent / (steps * n * phases)))
    return bits


def split_steps(topologies: Sequence[str], hidden: int, batch: int, rounds: int) -> Record:
    """Seconds of the phases of a step, by topology and method; see `time_phases`."""
    step, found = NoiseStep(hidden, batch), {}
    for topology in topologies:
        with Communicator(topology=cast(TopologyName, topology), timeout=300.0) as comm:
            found[topology] = time_phases(comm, step, rounds)
    return {"n": step.n, "split": found}


def time_phases(comm: Communicator, step: NoiseStep, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each phase of a step, a row for each round, in which the methods take turns; collective.

    Returns
    -------
    dict
        By method, rows of ``[compute, encode, merge, decode, wait, other]``: mean over ranks.
    """
    started = {name: method.start(comm, step.n) for name, method in TIMED.items()}
    out = np.zeros(step.n, np.float32)
    own: dict[str, list[list[float]]] = {name: [] for name in started}
    for name in turns(dict.fromkeys(started, WARMUP + rounds)):
        spin_barrier(comm)
        begun = time.perf_counter()
        gradient = step.gradient()
        computed = time.perf_counter() - begun
        started[name].aggregate(gradient, out)
        own[name].append([computed, *phases(started[name].traffic.last)])
    return {name: gather(comm, np.array(rows[WARMUP:])).mean(axis=0).tolist() for name, rows in own.items()}


def phases(call: Traffic) -> list[float]:
    """Seconds that a call spent encoding, merging, decoding, waiting, and with anything else."""
    known = [call.seconds_encoding, call.seconds_merging, call.seconds_decoding, call.seconds_waiting]
    return [*known, max(0.0, call.seconds_total - sum(known))]
