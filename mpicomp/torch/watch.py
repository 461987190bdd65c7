"""Diagnostics of a training: size of the residual, agreement with the exact mean, and a warning before it diverges.

A `BucketWatch` stands in front of three methods of a reducer: `begin`, `aggregate` and `wait`. Every few calls it takes
a sample of result and residual, a copy of 4,096 elements at most. Reducers without a watch are as they were.

    grows without bound      the mean of log |residual| over w measurements rises by log 2 or more, three times on end,
                             for some w of 4, 8, 16, ... 64
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from collectives.annotations import AnyArray, Doubles
from collectives.caller_warning import warn_caller
from collectives.quoting import shown
from mpicomp.torch.buckets.bucket_reducer import BucketReducer

RUNS, RUN = 32, 128
"""Runs of neighbouring elements in a sample, evenly spaced, and their length: a strided sample costs a cache line for
each element."""
WINDOWS, LEAST, MOST = 4, 4, 64
"""Windows that are compared, and measurements in the shortest and the longest ones; 4, as one step may be a spike."""
_NOTHING: Doubles = np.zeros(0)
_CURE = (
    "lower the learning rate, average in full precision now and then (full_precision_every=), send more bits "
    '(more levels, a lower rate), or average updates, synchronize="updates", for methods that are made for them'
)


@dataclass(frozen=True)
class Diagnostics:
    """State of a training, as of the last calls that were measured. NaN: nothing was measured yet.

    Norms are estimated from samples of 4,096 elements of each bucket.

    Parameters
    ----------
    update_norm : float
        Euclidean norm of the means, of gradients, updates or momenta; equal on all ranks.
    residual_norm : float
        Norm of the residuals of this rank; 0 without residuals.
    cosine : float
        Cosine of the angle between the means and the exact means of the same vectors, without residuals, at the last
        audit; equal on all ranks.
    audits : int
        Number of audits so far.
    clipped_share : float
        Largest share of elements that a method has clipped, over all ranks, among the buckets; NaN for methods that do
        not count them.
    """

    update_norm: float
    residual_norm: float
    cosine: float
    audits: int
    clipped_share: float

    @property
    def residual_ratio(self) -> float:
        """Norm of the residuals of this rank over that of the means."""
        return self.residual_norm / self.update_norm if self.update_norm else math.nan


class BucketWatch:
    """Measures the calls of one reducer.

    Attributes
    ----------
    update_norm, residual_norm : float
        Estimates at the last measurement; NaN before.
    growing : int
        Measurements in which the residual has doubled, three times on end: see `growing_window`.
    pair : tuple of two arrays, or None
        Samples of this rank's vector and of the result, weighted so that their products estimate those of the vectors:
        the next audit.
    """

    def __init__(self, reducer: BucketReducer, every: int, audit_every: int) -> None:
        self.update_norm = self.residual_norm = math.nan
        self.growing = 0
        self._logs: deque[float] = deque(maxlen=WINDOWS * MOST)  # of residual norms
        self.pair: tuple[Doubles, Doubles] | None = None
        self._reducer, self._every, self._audit_every, self._calls = reducer, every, audit_every, 0
        self._is_due, self._own = False, _NOTHING
        self._begin, self._aggregate, self._wait = reducer.begin, reducer.aggregate, reducer.wait
        for name in ("begin", "aggregate", "wait"):
            setattr(reducer, name, getattr(self, name))

    def begin(self) -> object:
        """See `BucketReducer.begin`."""
        self._open()
        return self._begin()

    def aggregate(self) -> None:
        """See `BucketReducer.aggregate`."""
        self._open()
        self._aggregate()
        self._close()

    def wait(self) -> bool:
        """See `BucketReducer.wait`."""
        has_mean = self._wait()
        if has_mean:
            self._close()
        return has_mean

    def _open(self) -> None:
        self._calls += 1
        audits = bool(self._audit_every) and self._calls % self._audit_every == 0
        self._is_due = audits or self._calls % self._every == 0
        if self._is_due:
            self._reducer.write_moves()  # else the mean of some methods is never written
            self._own = sampled(self._reducer.vector) if audits else _NOTHING

    def _close(self) -> None:
        if not self._is_due:
            return
        self._is_due = False
        mean, residual = sampled(self._reducer.mean), self._reducer.aggregator.residual
        self.update_norm = math.sqrt(mean @ mean)
        error = sampled(residual) if residual is not None and len(residual) else np.zeros(1)
        self.residual_norm = math.sqrt(error @ error)
        if self.residual_norm:
            self._logs.append(math.log(self.residual_norm))
            self.growing = growing_window(self._logs)
        if len(self._own):
            self.pair, self._own = (self._own, mean), _NOTHING


class TrainingWatch:
    """Watches all buckets of an optimizer or a hook, also those that are laid out later.

    Parameters
    ----------
    every : int
        Calls of a bucket from one measurement to the next.
    audit_every : int
        Calls from one audit to the next; 0: no audits.

    Raises
    ------
    ValueError
        A number of calls is not a whole number, or out of range.
    """

    def __init__(self, every: int, audit_every: int) -> None:
        for name, number, least in (("every", every, 1), ("audit_every", audit_every, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} is {shown(number)}; choose a whole number, {least} or more")
        self.plan = every, audit_every
        self._cosine, self._audits, self._warned = math.nan, 0, False

    def look(self, reducers: Sequence[BucketReducer], comm: Communicator) -> Diagnostics:
        """Return the last measurements, make the audits that are due, and warn once if a residual grows without bound.

        Collective where an audit is due.
        """
        watches = [_watch_on(reducer) or BucketWatch(reducer, *self.plan) for reducer in reducers]
        self._audit(comm, watches)
        self._warn_of_growth(comm, zip(reducers, watches, strict=True))
        feedbacks = [reducer.aggregator.feedback for reducer in reducers]
        clipped = [one.clipped_fraction for one in feedbacks if hasattr(one, "clipped_fraction")]
        return Diagnostics(
            _norm(one.update_norm for one in watches),
            _norm(one.residual_norm for one in watches),
            self._cosine,
            self._audits,
            max(clipped, default=math.nan),
        )

    def _audit(self, comm: Communicator, watches: Iterable[BucketWatch]) -> None:
        """Compare the results that wait for it with the exact means of the same samples."""
        pairs = [one.pair for one in watches if one.pair is not None]
        if not pairs:
            return
        for one in watches:
            one.pair = None
        own, mean = (np.concatenate(side) for side in zip(*pairs, strict=True))
        exact = comm.allreduce(own, "mean")
        lengths = math.sqrt(exact @ exact) * math.sqrt(mean @ mean)
        self._cosine = float(exact @ mean) / lengths if lengths else math.nan
        self._audits += 1

    def _warn_of_growth(self, comm: Communicator, watched: Iterable[tuple[BucketReducer, BucketWatch]]) -> None:
        growing = [(one, watch) for one, watch in watched if watch.growing]
        if growing and not self._warned:
            self._warned = True
            reducer, watch = growing[0]
            calls = watch.growing * self.plan[0]
            warn_caller(
                f"{comm.here}: the residual of {shown(reducer.bucket.names[0])} and its bucket has doubled three "
                f"times, every {calls} averages, and training is likely to diverge: {_CURE}",
                UserWarning,
            )


def _watch_on(reducer: BucketReducer) -> BucketWatch | None:
    """Return the watch in front of a reducer; it stays while the bucket's other reducer is in use, as with 0/1 Adam."""
    watch = getattr(reducer.begin, "__self__", None)
    return watch if isinstance(watch, BucketWatch) else None


def given_watch(before: TrainingWatch | None, every: int | None, audit_every: int | None) -> TrainingWatch:
    """Return the watch that there is, or a new one; raise ValueError if numbers are given that are not those of it."""
    if before is None:
        return TrainingWatch(10 if every is None else every, 0 if audit_every is None else audit_every)
    if any(one not in (None, kept) for one, kept in zip((every, audit_every), before.plan, strict=True)):
        raise ValueError(
            f"every={every} and audit_every={audit_every} differ from those of the first call, {before.plan}; leave "
            "them out"
        )
    return before


def growing_window(logs: Sequence[float]) -> int:
    """Return the length of the shortest windows over which a norm has at least doubled three times on end; 0: none.

    Parameters
    ----------
    logs
        Logarithms of the norm, oldest first.

    Examples
    --------
    >>> from mpicomp.torch.watch import growing_window
    >>> growing_window([0.2 * step for step in range(16)])  # by a factor of 1.22 each time
    4
    >>> growing_window([0.0] * 64)
    0
    """
    if not logs or max(logs) - min(logs) < 3 * math.log(2):  # as almost always, at a twentieth of the time
        return 0
    window, values = LEAST, np.array(logs)
    while window <= MOST and WINDOWS * window <= len(values):
        last = values[-WINDOWS * window :].reshape(WINDOWS, window).mean(axis=1)
        if (np.diff(last) >= math.log(2)).all():
            return window
        window *= 2
    return 0


def sampled(values: Tensor | AnyArray) -> Doubles:
    """Return evenly spaced elements of a vector as float64[k], scaled so that their norm estimates the vector's."""
    n = len(values)
    if isinstance(values, Tensor) and values.device.type == "cpu" and values.dtype != torch.bfloat16:
        values = values.detach().numpy()  # whose operations take a fifth of the time
    if n > RUNS * RUN:
        values = values[: RUNS * (n // RUNS)].reshape(RUNS, n // RUNS)[:, :RUN]
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    copied = np.array(values, np.float64).reshape(-1)
    return copied if len(copied) == n else copied * np.sqrt(n / len(copied))


def _norm(parts: Iterable[float]) -> float:
    """Return the norm of a vector of the norms of its parts, where they are known."""
    found = [one for one in parts if not math.isnan(one)]
    return math.hypot(*found) if found else math.nan
