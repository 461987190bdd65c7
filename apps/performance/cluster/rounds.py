"""Timing ways in turn, each as often as there is time for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apps.performance.cluster.sides import Side
from collectives import Communicator, Traffic
from collectives.trace.traffic import COSTS
from mpicomp.cli.timing import gather, spin_barrier

MOST_REPEATS = 200
WARMED_S = 1.0
"""Ways that take no longer are called once before each timed call: what only they use is then as fresh as in training.

A round can take a minute, and some virtual machines take back memory that was left alone for as long: 200 MB were
then read in 27 ms instead of 7.
"""


def called(repeat: int, repeats: int, rounds: int) -> bool:
    """Whether a way that is called `repeats` times in `rounds` rounds has its turn: evenly spread."""
    return (repeat + 1) * repeats // rounds > repeat * repeats // rounds


def repeats_for(seconds: float, share_s: float, least: int) -> int:
    """How often a way is called that takes so long and may take `share_s` altogether."""
    return max(least, min(MOST_REPEATS, int(share_s / max(seconds, 1e-9))))


def wire_bytes() -> int:
    """What this host has sent so far, headers and all."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def measure(
    sides: Mapping[str, Side], comm: Communicator, budget_s: float, least: Mapping[str, int], timed_at_once: set[str]
) -> dict[str, dict[str, Any]]:
    """Call every side once and check it, then time them in rounds; each round begins with the next one. Collective.

    Parameters
    ----------
    sides : dict of Side
        On all ranks the same, in the same order.
    comm : Communicator
        Its ranks line up before each call.
    budget_s : float
        Of all calls, shared evenly.
    least : dict of int
        Calls of each that are timed at least.
    timed_at_once : set of str
        Sides so slow that the first call counts too. Of the others a second one tells how often there is time for them.

    Returns
    -------
    dict of dict
        Per side: ``times_s`` of each call, the slowest rank's; ``cpu_s``, ``elapsed_s`` and what `Traffic` counts, per
        call, mean over ranks, and ``bytes_sent_most`` by a rank; ``wire_bytes`` of the first call, mean over ranks by
        the kernel's count, and ``wire_bytes_most``.
    """
    names = list(sides)
    first, spent = _first_calls(sides, comm, timed_at_once)
    slowest = gather(comm, first["estimate"]).max(axis=0)
    share_s = budget_s / max(1, len(names))
    warmed = slowest <= WARMED_S
    repeats = [
        repeats_for(seconds * (1 + warm), share_s, least[name]) - (name in timed_at_once)
        for name, seconds, warm in zip(names, slowest, warmed, strict=True)
    ]
    rounds = max(repeats, default=0)
    seconds, cpu = np.full((len(names), rounds + 1), np.nan), np.full((len(names), rounds + 1), np.nan)
    for i, name in enumerate(names):
        if name in timed_at_once:
            seconds[i, rounds], cpu[i, rounds] = first["seconds"][i], first["cpu"][i]
    for number in range(rounds):
        for place in range(len(names)):
            i = (number + place) % len(names)
            if called(number, repeats[i], rounds):
                side = sides[names[i]]
                if warmed[i]:
                    side.call()
                before = costs_of(side.traffic)
                seconds[i, number], cpu[i, number] = timed(side.call, comm)
                spent[names[i]] += costs_of(side.traffic) - before
    everyones, everyones_cpu = gather(comm, seconds), gather(comm, cpu)
    sent = gather(comm, first["wire"])
    found = {}
    for i, name in enumerate(names):
        there = ~np.isnan(seconds[i])
        found[name] = {
            "times_s": everyones[:, i, there].max(axis=0).tolist(),
            "elapsed_s": float(everyones[:, i, there].mean()),
            "cpu_s": float(everyones_cpu[:, i, there].mean()),
            "wire_bytes": float(sent[:, i].mean()),
            "wire_bytes_most": float(sent[:, i].max()),
            "cost": mean_cost(comm, spent[name] / there.sum()),
        }
    return found


def _first_calls(
    sides: Mapping[str, Side], comm: Communicator, timed_at_once: set[str]
) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """Warm every side up and check its result; and what the timed ones of these calls cost us."""
    first = {what: np.zeros(len(sides)) for what in ("seconds", "cpu", "wire", "estimate")}
    spent = {}
    for i, (name, side) in enumerate(sides.items()):
        before = costs_of(side.traffic)
        comm.barrier()
        sent = wire_bytes()
        first["seconds"][i], first["cpu"][i] = timed(side.call, comm)
        comm.barrier()
        first["wire"][i] = wire_bytes() - sent
        side.check()
        at_once = name in timed_at_once
        spent[name] = (costs_of(side.traffic) - before) * at_once
        first["estimate"][i] = first["seconds"][i] if at_once else timed(side.call, comm)[0]
    return first, spent


def timed(call: Callable[[], object], comm: Communicator) -> tuple[float, float]:
    """Elapsed and processor seconds of a call on this rank, after all have lined up; collective."""
    spin_barrier(comm)
    cpu, start = time.process_time(), time.perf_counter()
    call()
    elapsed = time.perf_counter() - start
    return elapsed, time.process_time() - cpu


def costs_of(traffic: Traffic | None) -> NDArray[np.float64]:
    """Its `COSTS`; none without traffic."""
    return np.array([] if traffic is None else [float(getattr(traffic, name)) for name in COSTS])


def mean_cost(comm: Communicator, mine: NDArray[np.float64]) -> dict[str, float] | None:
    """The mean over ranks of what `costs_of` gives, and ``bytes_sent_most`` by one; collective."""
    if not mine.size:
        return None
    everyones = gather(comm, mine)
    most = float(everyones[:, COSTS.index("bytes_sent")].max())
    return dict(zip(COSTS, everyones.mean(axis=0).tolist(), strict=True)) | {"bytes_sent_most": most}
