"""Numbers made of records: best, speed-up, bound, break-even."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from apps.emulator.rate import token_bucket
from apps.performance.cluster.implementations import (
    DENSE_RING,
    GLOO,
    MARSIT_RING,
    MPI_DEFAULT,
    MPICH_DEFAULT,
    ONE_BIT_RING,
    TUNED_NAMES,
)
from apps.performance.cluster.records import IN_MPICH, cluster_of, medians_by_job
from apps.records import Record
from collectives.cost.rate import Rate

NOTEWORTHY = 0.1
"""From what share on tables mark that the bucket of a link helped."""
MPI_NAMES = (MPI_DEFAULT, *TUNED_NAMES)
DENSE_NAMES = (*MPI_NAMES, GLOO, DENSE_RING)
BEST_DENSE = "best dense"
"""The baseline of every speed-up: the fastest of `DENSE_NAMES` in the same run."""
PERIOD = 100
"""Steps from one full-precision round of Marsit to the next, by default."""


def seconds(record: Record, name: str) -> float | None:
    """Median over jobs of an implementation's median in each; None where it was not measured."""
    timed = record["timings"].get(name)
    return None if timed is None else float(timed["median_s"])


def best_mpi(record: Record) -> tuple[str, float] | None:
    """The fastest of Open MPI in this cell, its default included: name and median."""
    return _fastest(record, MPI_NAMES)


def best_dense(record: Record) -> tuple[str, float] | None:
    """The fastest all-reduce without compression in this cell, of Open MPI, Gloo and ours: name and median."""
    return _fastest(record, DENSE_NAMES)


def _fastest(record: Record, names: Sequence[str]) -> tuple[str, float] | None:
    measured = [(name, s) for name in names if (s := seconds(record, name)) is not None]
    return min(measured, key=lambda pair: pair[1], default=None)


def speedup(record: Record, name: str, over: str) -> float | None:
    """Return the speed-up of one implementation over another; `over` may be `BEST_DENSE`."""
    best = best_dense(record)
    ours = seconds(record, name)
    theirs = (best[1] if best else None) if over == BEST_DENSE else seconds(record, over)
    return None if ours is None or theirs is None else theirs / ours


def default_speedup(record: Record) -> float | None:
    """Return the speed-up of Marsit's defaults over `BEST_DENSE`: of `PERIOD` calls, one is a dense ring's."""
    best, ours, full = best_dense(record), seconds(record, MARSIT_RING), seconds(record, DENSE_RING)
    return None if best is None or ours is None or full is None else best[1] * PERIOD / ((PERIOD - 1) * ours + full)


def speedups_by_job(record: Record, name: str, over: str) -> list[float]:
    """The same of the medians of each job."""
    best = best_dense(record)
    baseline = best[0] if over == BEST_DENSE and best is not None else over
    if name not in record["timings"] or baseline not in record["timings"]:
        return []
    pairs = zip(*(medians_by_job(record["timings"][one]) for one in (name, baseline)), strict=True)
    return [theirs / ours for ours, theirs in pairs]


def over_mpich(record: Record) -> float | None:
    """Return the speed-up of the one-bit ring over MPICH's all-reduce, both in jobs with MPICH."""
    return speedup(record, ONE_BIT_RING + IN_MPICH, MPICH_DEFAULT)


def payload_rate(record: Record) -> float:
    """Bits per second of the slowest link, as measured before the job."""
    return float(min(link["bits_per_s"] for link in record["links"]))


def nominal_rate(record: Record) -> float | None:
    """Requested bits per second of the slowest link; None: not limited."""
    return cluster_of(record).bits_per_s


def bucket_share(record: Record) -> float:
    """Return the time that the slowest link's bucket of tokens saves the one-bit ring, as a share of its time.

    A link lets through the tokens of its bucket at once, which a real link does not. This flatters implementations
    that send little.
    """
    timed, bits_per_s = record["timings"].get(ONE_BIT_RING), nominal_rate(record)
    if timed is None or timed["cost"] is None or bits_per_s is None:
        return 0.0
    arguments = token_bucket(Rate(bits_per_s))
    burst = int(arguments[arguments.index("burst") + 1])
    return float(8 * min(burst, timed["cost"]["bytes_sent"]) / bits_per_s / timed["median_s"])


def bound_s(record: Record, bits_per_s: float) -> float:
    """Seconds that the busiest link of an all-reduce needs at least: 2 (M - 1) / M of the vector."""
    nodes = record["settings"]["nodes"]
    return float(2 * (nodes - 1) / nodes * 8 * record["settings"]["bytes"] / bits_per_s)


def over_bound(record: Record, bits_per_s: float | None) -> float | None:
    """The dense ring's time in units of the bound."""
    ring = seconds(record, DENSE_RING)
    return None if ring is None or bits_per_s is None else ring / bound_s(record, bits_per_s)


def find_balance(overlaps: Sequence[Record]) -> float | None:
    """Bits per second of payload at which wire and computing take equally long; None: at none between those measured.

    Computing does not depend on the rate, but on how memory was shared meanwhile: its median counts.
    """
    if not overlaps:
        return None
    compute_s = median(record["compute_s"] for record in overlaps)
    return find_crossing([(payload_rate(record), record["wire_s"] / compute_s) for record in overlaps])


def find_crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Return x where y of the positive (x, y) falls below 1 last, interpolated between logarithms; None: nowhere."""
    found = None
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        a, b = math.log(y0), math.log(y1)
        if a >= 0 > b:
            found = math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * a / (a - b))
    return found
