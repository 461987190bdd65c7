"""Bytes and times of DoubleSqueeze over MPI: with and without a server, and on links of each rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from apps.emulator.network import ClusterError
from apps.mpi_jobs import call_on_ranks
from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.doublesqueeze.job import DETERMINISTIC, compare_topologies, time_calls, time_step
from apps.reproduce.doublesqueeze.learning import BATCH, HIDDEN
from apps.reproduce.doublesqueeze.methods import BUCKET, METHODS, RANKS, RIVALS, TOPOLOGIES
from apps.studies.results import Results, slug

RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "none": "not limited"}
MODEL = 784 * HIDDEN + HIDDEN + HIDDEN * 10 + 10  # elements of the trained model
RESNET_18 = 11_173_962  # with ten classes, as in the paper
LARGEST = 25_000_000
REPEATS = 5
BYTES_OFF = 0.02  # padding, and the words that report NaN
EQUAL_STEPS = 5

Times = dict[str, Record]
"""By rate: ``times`` by length, topology and method, and ``payload_bits_per_s``."""


def compare(results: Results) -> list[Claim]:
    """Both topologies give the same bits, and send the bytes of the formula."""
    arguments = {"topologies": list(TOPOLOGIES), "n": MODEL, "steps": EQUAL_STEPS}
    found = results.get("forms", arguments, partial(call_on_ranks, compare_topologies, arguments, RANKS))
    equal = [
        name for name in DETERMINISTIC if all(found["star"][name][key] == found["ring"][name][key]
                                              for key in ("digest", "errors"))
    ]  # fmt: skip
    off = {
        f"{name} ({TOPOLOGIES[topology]})": row["bytes"] / row["formula"] - 1
        for topology, rows in found.items()
        for name, row in rows.items()
    }
    sent = "; ".join(
        f"{TOPOLOGIES[topology]}: " + ", ".join(f"{name} {rows[name]['busiest'] / 1e3:.1f} kB" for name in METHODS)
        for topology, rows in found.items()
    )
    return [
        Claim(
            "algorithm",
            "a server and an owner for each shard compute the same",
            "“not only for parameter servers”",
            f"results of {EQUAL_STEPS} steps and all errors equal bit for bit: {len(equal)} of {len(DETERMINISTIC)} "
            f"({', '.join(equal) or 'none'})",
            len(equal) == len(DETERMINISTIC),
            f"compressors that draw nothing, on the same buckets of {BUCKET}; {RANKS} ranks over MPI, {MODEL} elements",
        ),
        Claim(
            "algorithm",
            "both passes carry codes",
            "formula: (M − 1)(first + second) of all ranks, M (M − 1) first where codes are gathered",
            f"off by {100 * min(off.values()):+.2f} % to {100 * max(off.values()):+.2f} % "
            f"({max(off, key=off.__getitem__)}); the busiest rank sends, {sent}",
            max(map(abs, off.values())) <= BYTES_OFF,
            f"counted over MPI, {MODEL} elements, with padding and the words by which ranks report whether their "
            f"step is finite; judged: within {BYTES_OFF:.0%}",
        ),
    ]


def step_seconds(results: Results) -> float:
    """Time of a forward and backward pass of the trained model, on all ranks at once."""
    arguments = {"hidden": HIDDEN, "batch": BATCH, "repeats": 30}
    return float(results.get("step", arguments, partial(call_on_ranks, time_step, arguments, RANKS))["median_s"])


def measured(results: Results, full: bool) -> Times | str:
    """Times at each rate; or the reason why records are missing."""
    found: Times = {}
    lengths = [MODEL, RESNET_18, *([LARGEST] if full else [])]
    arguments = {"topologies": list(TOPOLOGIES), "lengths": lengths, "repeats": REPEATS}
    for rate in RATES:
        name, settings = f"times-{rate}{'-full' if full else ''}", {**arguments, "rate": rate, "ranks": RANKS}
        try:
            found[rate] = results.get(name, settings, partial(call_on_ranks, time_calls, arguments, RANKS, rate))
        except (ClusterError, FileNotFoundError) as error:
            return str(error)
    return found


def seconds(found: Times, rate: str, n: int, topology: str, name: str) -> float:
    """Time of a synchronization: the median call on the slowest rank."""
    return float(found[rate]["times"][str(n)][topology][name]["median_s"])


def speedups(found: Times, n: int, topology: str, ours: str, other: str) -> dict[str, float]:
    """Return the speed-ups of our synchronization over the other, by rate."""
    return {rate: seconds(found, rate, n, topology, other) / seconds(found, rate, n, topology, ours) for rate in found}


def judge(found: Times | str, full: bool) -> list[Claim]:
    """Check whether DoubleSqueeze is faster than each rival on slow links, and gains more the slower they are."""
    where = "experiments, time against bandwidth"
    if isinstance(found, str):
        return [Claim(where, "DoubleSqueeze is faster on slow links", "curves", "left out", None, found)]
    n = LARGEST if full else RESNET_18
    ratios = {
        f"{ours} over {other}, {called}": speedups(found, n, topology, ours, other)
        for topology, called in TOPOLOGIES.items()
        for ours, others in RIVALS.items()
        for other in others
    }
    kept = [one["100mbit"] > max(1.0, one["1gbit"]) for one in ratios.values()]
    listed = "; ".join(f"{pair} {', '.join(f'{one:.1f}x' for one in gains.values())}" for pair, gains in ratios.items())
    return [
        Claim(
            where,
            "DoubleSqueeze is faster than each rival at 100 Mbit/s, and gains more than at 1 Gbit/s",
            "the gap widens as bandwidth falls",
            f"{sum(kept)} of {len(kept)} pairs; at {', '.join(RATES.values())}: {listed}",
            all(kept),
            f"time of a synchronization of {n / 1e6:.1f} M elements alone, {RANKS} emulated hosts on the processors of "
            "one machine, where computing the codes takes longer than on hosts of their own; one claim, of all pairs",
        )
    ]


def draw(found: Times | str, folder: Path, full: bool) -> list[Path]:
    """Draw the time of a synchronization, and the gain of DoubleSqueeze, against the rate of a link."""
    if isinstance(found, str):
        return []
    drawn = []
    n = LARGEST if full else RESNET_18
    carried = [record["payload_bits_per_s"] / 1e6 for record in found.values()]
    for topology, called in TOPOLOGIES.items():
        taken = [
            Curve(name, carried, [[seconds(found, rate, n, topology, name) for rate in found]]) for name in METHODS
        ]
        gains = [
            Curve(f"{ours} over {other}", carried, [list(speedups(found, n, topology, ours, other).values())])
            for ours, others in RIVALS.items()
            for other in others
        ]
        x_label = f"Mbit/s that a link carries ({called})"
        for what, lines, label in (("seconds", taken, "seconds per synchronization"), ("gain", gains, "times faster")):
            drawn.append(curves(folder / f"{what}-{slug(called)}.png", lines, x_label, label, log=True, log_x=True))
    return drawn
