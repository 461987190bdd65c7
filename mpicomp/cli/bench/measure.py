"""Time a subject and its baseline in turn, and count what the subject costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.trace.traffic import COSTS
from mpicomp.cli.bench.subjects import Subject
from mpicomp.cli.timing import Seconds, alternate, gather


@dataclass(frozen=True)
class Measurement:
    """One vector length.

    Attributes
    ----------
    seconds : float64[repeats]
        Of each timed call, on the slowest rank.
    baseline_seconds : float64[repeats] or None
        Likewise.
    cost : dict of float
        Fields of `Traffic` for one call, as the mean over calls and ranks.
    """

    seconds: Seconds
    baseline_seconds: Seconds | None
    cost: dict[str, float]


def measure(
    comm: Communicator,
    subject: Subject,
    other: Subject | None,
    x: NDArray[Any],
    out: NDArray[Any],
    repeats: int,
    warmup: int,
) -> Measurement:
    """Time both subjects alternately, each call behind a barrier of its own; collective.

    Parameters
    ----------
    comm : Communicator
    subject, other : Subject
        What is timed, and the baseline.
    x, out : ndarray[n]
        `out` is overwritten by both.
    repeats, warmup : int
        Calls of each that are timed, and calls before.

    Raises
    ------
    CollectiveError
    """
    calls = {"subject": partial(subject, x, out)}
    if other is not None:
        calls["baseline"] = partial(other, x, out)
    alternate(calls, warmup, 0, comm)
    before = subject.total()
    timed = alternate(calls, repeats, 0, comm)
    after = subject.total()
    spent = [(getattr(after, name) - getattr(before, name)) / repeats for name in COSTS]
    cost = dict(zip(COSTS, gather(comm, np.array(spent, np.float64)).mean(axis=0).tolist(), strict=True))
    return Measurement(timed["subject"], timed.get("baseline"), cost)
