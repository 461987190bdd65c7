"""Figure 5 of Marsit: the time of the phases of a step, by method, over a ring and a torus."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apps.emulator.network import ClusterError
from apps.mpi_jobs import call_on_ranks
from apps.plotting import Bars, draw_bars, save
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.marsit.job import split_steps
from apps.studies.results import Results

HOSTS, RATE = 4, "1gbit"
BUSY = 0.5  # processors that other programs use before the job
LOOK_S = 1.0
Rows = NDArray[np.float64]
"""Seconds, a row for each round, a column for each phase."""
TOPOLOGIES = ("ring", "torus")
PHASES = ("compute", "encode", "merge", "decode", "wait", "MPI, Python, others' turn")


def figure_5(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Time steps on emulated hosts at 1 Gbit/s; without root or ``tc``, between processes that share memory."""
    arguments = {"topologies": [*TOPOLOGIES], "hidden": 1024, "batch": 16, "rounds": 60 if full else 20}

    def measure() -> Record:
        busy, call = {"others_use": others_use()}, partial(call_on_ranks, split_steps, arguments, HOSTS)
        try:
            return {**call(RATE), **busy}
        except (ClusterError, FileNotFoundError) as error:
            return {**call(), **busy, "no_hosts": str(error)}

    found = results.get("figure-5", {**arguments, "hosts": HOSTS, "rate": RATE, "looked_s": LOOK_S}, measure)
    split = {
        topology: {name: np.array(rows) for name, rows in of_one.items()} for topology, of_one in found["split"].items()
    }
    where = f"{HOSTS} emulated hosts at {RATE}" if "no_hosts" not in found else f"{HOSTS} processes, shared memory"
    bars = [
        Bars(topology, {name: [float(1e3 * np.median(rows[:, place])) for place in range(len(PHASES))]
                        for name, rows in of_one.items()})
        for topology, of_one in split.items()
    ]  # fmt: skip
    figure = save(draw_bars(bars, PHASES, f"ms of a step, {where}"), results.folder / "figure-5.png")
    differs = (
        f"{where}, no GPU; a perceptron of {found['n']:,} parameters, {arguments['batch']} images per rank; one step "
        f"per synchronization; {arguments['rounds']} rounds of all methods in turn, medians"
    )
    if "no_hosts" in found:
        differs += f"; hosts with slow links could not be emulated here ({found['no_hosts']})"
    claims = [
        *(of_topology(topology, of_one, differs) for topology, of_one in split.items()),
        torus_against_ring(split),
    ]
    return [unless_busy(claim, found["others_use"]) for claim in claims], [figure]


def others_use(seconds: float = LOOK_S, accounts: Path = Path("/proc/stat")) -> float:
    """The number of processors that are used while this process sleeps; 0 if the system does not report it.

    The load average would count what this study itself has computed in the minutes before.
    """
    if not accounts.exists():
        return 0.0

    def ticks() -> tuple[int, int]:
        """All ticks, and idle ones."""
        spent = [int(text) for text in accounts.read_text().splitlines()[0].split()[1:9]]
        return sum(spent), spent[3] + spent[4]

    before = ticks()
    time.sleep(seconds)
    after = ticks()
    total, idle = (end - start for start, end in zip(before, after, strict=True))
    return (os.cpu_count() or 1) * (total - idle) / max(total, 1)


def unless_busy(claim: Claim, processors: float) -> Claim:
    """The claim; it is not judged if other programs used processors right before times were taken."""
    if processors <= BUSY:
        return claim
    reason = f"**not judged**: other programs used {processors:.1f} processors; remove figure-5.json and try again"
    return replace(claim, holds=None, differs=f"{reason}; {claim.differs}")


def communicating(rows: Rows) -> Rows:
    """Seconds of each round outside of computing and kernels: waiting, MPI, Python."""
    return np.asarray(rows[:, 4] + rows[:, 5])


def of_topology(topology: str, rows: dict[str, Rows], differs: str) -> Claim:
    """Check whether Marsit communicates for a shorter time than every other method."""
    marsit = 1e3 * communicating(rows["Marsit"])
    others = {name: paired(marsit.tolist(), (1e3 * communicating(of_one)).tolist()) for name, of_one in rows.items()
              if name != "Marsit"}  # fmt: skip
    medians = ", ".join(f"{name} {1e3 * np.median(communicating(of_one)):.1f}" for name, of_one in rows.items())
    kernels = 1e3 * np.median(rows["Marsit"][:, 1:4].sum(axis=1))
    return Claim(
        "Fig. 5b" if topology == "ring" else "Fig. 5a",
        f"{topology}: Marsit communicates for the shortest time",
        "bars",
        f"ms: {medians}; Marsit − " + ", − ".join(f"{name} {gain}" for name, gain in others.items())
        + f"; Marsit's kernels {kernels:.2f}",
        all(gain.below for gain in others.values()),
        differs,
    )  # fmt: skip


def torus_against_ring(split: dict[str, dict[str, Rows]]) -> Claim:
    """Check whether every method communicates for a shorter time over the torus."""
    medians = {
        name: [float(np.median(communicating(split[topology][name]))) for topology in ("torus", "ring")]
        for name in split["ring"]
    }
    return Claim(
        "Fig. 5",
        "each method communicates for a shorter time over the torus than over the ring",
        "bars",
        "torus over ring: " + ", ".join(f"{name} {torus / ring:.2f}" for name, (torus, ring) in medians.items()),
        all(torus < ring for torus, ring in medians.values()),
        "2 x 2 against a ring of 4: 4 rounds of messages for 6, the same bytes",
    )
