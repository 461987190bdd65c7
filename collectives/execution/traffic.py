"""Cost of calls: bytes, messages and seconds of one call, and of all calls of an aggregator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields


@dataclass
class Traffic:
    """Cost of one call, or of many.

    Parameters
    ----------
    calls : int
        Number of collectives.
    bytes_sent, messages : int
        Sent by this rank, including checks of calls and flags.
    seconds_encoding, seconds_merging, seconds_decoding : float
        Seconds in kernels.
    seconds_waiting : float
        Seconds in which the rank had nothing to do but wait.
    seconds_total : float
        Seconds from start to result.

    Attributes
    ----------
    clock : callable
        Clock of all these seconds; no field of the dataclass. With `time.thread_time` they are processor time of this
        thread, without the time of other processes on the core. Traces need `time.perf_counter`, the default.
    started, ended : float
        Times of a call; no fields either. Calls in flight overlap, so that their seconds do not add up to the time in
        which a rank communicates. 0: there was no call, or it has not ended.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> from collectives import Traffic
    >>> def count(comm):
    ...     comm.allreduce(np.ones(1_000_000, np.float32))
    ...     return comm.traffic
    >>> traffic = mpicomp.run_local(2, count, topology="ring")[0]
    >>> traffic.calls, traffic.bytes_sent >= 4_000_000, traffic.seconds > 0
    (1, True, True)
    >>> total = Traffic()
    >>> total.add(traffic)
    >>> total.bytes_sent == traffic.bytes_sent
    True
    """

    calls: int = 0
    bytes_sent: int = 0
    messages: int = 0
    seconds_encoding: float = 0.0
    seconds_merging: float = 0.0
    seconds_decoding: float = 0.0
    seconds_waiting: float = 0.0
    seconds_total: float = 0.0

    def __post_init__(self) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self.started = self.ended = 0.0

    def add(self, other: Traffic) -> None:
        """Add the cost of the calls that `other` counts."""
        self.calls += other.calls
        self.bytes_sent += other.bytes_sent
        self.messages += other.messages
        self.seconds_encoding += other.seconds_encoding
        self.seconds_merging += other.seconds_merging
        self.seconds_decoding += other.seconds_decoding
        self.seconds_waiting += other.seconds_waiting
        self.seconds_total += other.seconds_total

    @property
    def seconds(self) -> float:
        """Same as ``seconds_total``."""
        return self.seconds_total


COSTS = tuple(one.name for one in fields(Traffic) if one.name != "calls")
"""Numbers that grow from call to call, except the number of calls."""


@dataclass
class TrafficLog:
    """Cost of the last call and of all calls, by a `clock` that can be set between calls; see `Traffic`.

    Parameters
    ----------
    last, total : Traffic
        Seconds of `total` are sums over calls, of which some may have been in flight at the same time.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> with mpicomp.Communicator() as comm:
    ...     qsgd = mpicomp.QSGD().start(comm, 1000)
    ...     for _ in range(3):
    ...         mean = qsgd.aggregate(np.ones(1000, np.float32))
    >>> qsgd.traffic.last.calls, qsgd.traffic.total.calls
    (1, 3)
    """

    last: Traffic = field(default_factory=Traffic)
    total: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.clock: Callable[[], float] = time.perf_counter

    def begin(self) -> Traffic:
        """Start a call; its cost is counted into `last`."""
        self.last = Traffic(calls=1)
        self.last.clock = self.clock
        self.last.started = self.clock()
        return self.last
