"""Time implementations in turn, each as often as there is time for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apps.performance.cluster.prepared import Prepared
from apps.performance.durations import elapsed_and_processor
from collectives import Communicator
from collectives.execution.traffic import COSTS
from mpicomp.cli.timing import gather, slowest, turns

MOST_REPEATS = 200
WARMED_S = 1.0
"""Implementations that take no longer are called once, untimed, before each timed call.

A round can take a minute, and some virtual machines take back memory that is idle for as long: 200 MB were then read in
27 ms instead of 7. The call before makes memory that only one implementation uses as fresh as it is in training.
"""


def repeats_for(seconds: float, share_s: float, least: int) -> int:
    """Return the number of calls of so many seconds that take `share_s` altogether."""
    return max(least, min(MOST_REPEATS, int(share_s / max(seconds, 1e-9))))


def wire_bytes() -> int:
    """Return the bytes that this host has sent so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def measure(
    prepared: Mapping[str, Prepared],
    comm: Communicator,
    repeats: Callable[[str, float], int],
    timed_at_once: frozenset[str] = frozenset(),
) -> dict[str, dict[str, Any]]:
    """Call every implementation once and check its result, then time all in turn; collective.

    Parameters
    ----------
    prepared : dict of Prepared
        On all ranks the same, in the same order.
    comm : Communicator
    repeats : callable
        How often an implementation is timed, of its name and of what one round of it takes.
    timed_at_once : set of str
        Implementations so slow that the first call counts too. Of the others a second one tells how long it takes.

    Returns
    -------
    dict of dict
        Per implementation: ``times_s`` of each call on the slowest rank, their ``median_s`` and ``min_s``; ``cpu_s``,
        ``elapsed_s`` and ``cost``, what `Traffic` counts, as means over calls and ranks; ``wire_bytes`` of the first
        call by the kernel's count, mean over ranks, and ``wire_bytes_most`` of a rank.
    """
    samples: dict[str, list[NDArray[np.float64]]] = {name: [] for name in prepared}
    wire, seconds = {}, {}
    for name, one in prepared.items():
        comm.barrier()
        sent = wire_bytes()
        first = _sample(one, comm)
        comm.barrier()
        wire[name] = gather(comm, np.array([wire_bytes() - sent], np.float64))
        one.check()
        if name in timed_at_once:
            samples[name].append(first)
        seconds[name] = float(slowest((first if name in timed_at_once else _sample(one, comm))[:1], comm)[0])
    warmed = {name for name, one_s in seconds.items() if one_s <= WARMED_S}
    counts = {
        name: max(0, repeats(name, one_s * (1 + (name in warmed))) - (name in timed_at_once))
        for name, one_s in seconds.items()
    }
    for name in turns(counts):
        if name in warmed:
            prepared[name].call()
        samples[name].append(_sample(prepared[name], comm))
    return {
        name: {
            **_summary(gather(comm, np.array(samples[name]))),
            "wire_bytes": float(wire[name].mean()),
            "wire_bytes_most": float(wire[name].max()),
        }
        for name in prepared
    }


def _sample(one: Prepared, comm: Communicator) -> NDArray[np.float64]:
    """Elapsed and processor seconds of a call, and its `COSTS` where it has traffic."""
    before = _costs(one)
    seconds, processor = elapsed_and_processor(one.call, comm)
    return np.array([seconds, processor, *(_costs(one) - before)])


def _costs(one: Prepared) -> NDArray[np.float64]:
    return np.array([] if one.traffic is None else [float(getattr(one.traffic, name)) for name in COSTS])


def _summary(samples: NDArray[np.float64]) -> dict[str, Any]:
    """Return the result of `measure`, of samples ``[ranks, calls, ...]``."""
    times = samples[:, :, 0].max(axis=0)
    elapsed_s, cpu_s, *costs = samples.mean(axis=(0, 1)).tolist()
    sent = COSTS.index("bytes_sent")
    most = {"bytes_sent_most": float(samples[:, :, 2 + sent].mean(axis=1).max())} if costs else {}
    return {
        "times_s": times.tolist(),
        "median_s": float(np.median(times)),
        "min_s": float(times.min()),
        "elapsed_s": elapsed_s,
        "cpu_s": cpu_s,
        "cost": dict(zip(COSTS, costs, strict=True)) | most if costs else None,
    }
