"""What a collective cost: bytes and messages handed to MPI, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields


@dataclass
class Traffic:
    """Cost of one call, or of many.

    Attributes
    ----------
    calls : int
        Collectives counted in.
    bytes_sent, messages : int
        Handed to MPI by this rank for sending; agreement checks and flags included.
    seconds_encoding, seconds_merging, seconds_decoding : float
        In kernels.
    seconds_waiting : float
        With nothing to do but wait.
    seconds_total : float
        From start to result.
    clock : callable
        What all these seconds are measured by; no field of the dataclass. By `time.thread_time` they are the
        processor's that this rank has used itself, whoever else used it in between. Traces need `time.perf_counter`,
        the default.
    started, ended : float
        Of a call, by the clock; no fields either. Calls in flight overlap, and so their seconds do not add up to those
        in which a rank communicates. 0: there was no call, or it has not ended.
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
        """Count another call in."""
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
"""What grows from call to call."""


@dataclass
class TrafficLog:
    """The last call's cost, and the sum of all, by a `clock` that can be set between calls; see `Traffic`."""

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
