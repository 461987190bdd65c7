"""An emulated link: messages of a communicator are held back until a link of a chosen rate would have delivered them.

Each node has a link to a switch, as hosts have; a node is a rank, or the ranks that the caller names. A message leaves
once those before it have left, at the link's rate, and arrives a latency later. It is given to MPI only then, so that
nodes need no common clock. Messages of several senders share the receiver's link: each occupies it for as long as it
takes at the link's rate. A message of n bytes takes as many bytes more as its TCP segments have headers. The ranks of a
node share its link: their messages leave in the order in which they are posted, and those from one to another pass by.
"""

# ruff: noqa: N802 - named as in mpi4py, and doing the same

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from collectives.annotations import Testable, override
from collectives.cost.rate import EmulatedLink
from collectives.emulation.link_clock import IN, OUT, LinkClock

SEGMENT_BYTES, HEADER_BYTES = 1448, 66  # of TCP over Ethernet: 14 of Ethernet, 20 of IP, 32 of TCP


class SlowLink:
    """The link of one rank's node, which all of the rank's communicators share.

    Parameters
    ----------
    link : EmulatedLink
    node : int
        Number of the node.
    clock : LinkClock, optional
        The node's; None: the rank has the link to itself.
    """

    def __init__(self, link: EmulatedLink, node: int = 0, clock: LinkClock | None = None) -> None:
        self.link, self.node, self._seconds_a_byte = link, node, 1 / link.bytes_per_s
        self._clock = LinkClock() if clock is None else clock
        self._held: deque[HeldSend] = deque()  # not given to MPI yet, in the order of posting
        self._releases: deque[float] = deque()  # of messages that have come, and are held back; they only rise
        self._lock = threading.Lock()  # a progress thread and the calling one use the link

    def seconds(self, nbytes: int) -> float:
        """Return the time for which a message occupies a link."""
        return (nbytes + HEADER_BYTES * max(1, math.ceil(nbytes / SEGMENT_BYTES))) * self._seconds_a_byte

    def post(self, send: HeldSend) -> None:
        """Let a message leave once those before it have left."""
        with self._lock:
            left = self._clock.occupy(OUT, time.perf_counter(), self.seconds(send.nbytes))
            send.due = left + self.link.latency_s
            self._held.append(send)

    def carry(self, nbytes: float) -> float:
        """Return the time at which bytes of a collective of MPI, which begins now, have passed the link."""
        with self._lock:
            return self._clock.occupy(OUT, time.perf_counter(), self.seconds(int(nbytes)))

    def pump(self) -> None:
        """Give the messages to MPI that have left."""
        if self._held:
            with self._lock:
                now = time.perf_counter()
                while self._held and self._held[0].due <= now:
                    self._held.popleft().launch()  # in the order of posting, by which MPI matches messages

    def arrive(self, nbytes: int) -> float:
        """Return the time until which a message that MPI has delivered is held back."""
        with self._lock:
            now, seconds = time.perf_counter(), self.seconds(nbytes)
            release = self._clock.occupy(IN, now - seconds, seconds)  # the time passed while the message left its node
            self._forget_releases(now)
            if release > now:
                self._releases.append(release)
            return release

    def _forget_releases(self, now: float) -> None:
        while self._releases and self._releases[0] <= now:
            self._releases.popleft()

    def rest_s(self, longest: float) -> float:
        """Return the seconds until a held message moves on, at most `longest`."""
        with self._lock:
            now = time.perf_counter()
            self._forget_releases(now)
            first = self._releases[0] if self._releases else math.inf
            if self._held:
                first = min(first, self._held[0].due)
        return min(longest, max(0.0, first - now))


class HeldSend(Testable):
    """Send that is given to MPI once it has left. `start` starts it there and returns the request."""

    __slots__ = ("_error", "_link", "_request", "_start", "due", "nbytes")

    def __init__(self, link: SlowLink, nbytes: int, start: Callable[[], Any], request: Any = None) -> None:
        self._link, self.nbytes, self._start, self._request = link, nbytes, start, request
        self.due = math.inf
        self._error: Exception | None = None

    def Start(self) -> None:
        """Post the message, of a persistent request."""
        self.due = math.inf
        self._link.post(self)

    def launch(self) -> None:
        """Give the message to MPI. An error is raised by `Test`: another message's request may have got here."""
        self.due = -math.inf
        try:
            self._request = self._start() or self._request
        except Exception as error:  # noqa: BLE001 - of a communicator that has ended, as a rule
            self._error = error

    @override
    def Test(self) -> bool:
        self._link.pump()
        if self._error is not None:
            raise self._error
        return self.due == -math.inf and bool(self._request.Test())

    def Free(self) -> None:
        """Free the persistent request."""
        self._request.Free()


class HeldReceive(Testable):
    """Request that is over some time after MPI's own; `hold(status)` returns the time."""

    __slots__ = ("_hold", "_link", "_release", "_request", "_status")

    def __init__(self, link: SlowLink, request: Any, hold: Callable[[MPI.Status], float]) -> None:
        self._link, self._request, self._hold, self._release = link, request, hold, math.inf
        self._status = MPI.Status()

    def Start(self) -> None:
        """Start the persistent request."""
        self._release = math.inf
        self._request.Start()

    @override
    def Test(self) -> bool:
        self._link.pump()
        if self._release == math.inf:
            if not self._request.Test(self._status):
                return False
            self._release = self._hold(self._status)
        return time.perf_counter() >= self._release

    def Free(self) -> None:
        """Free the persistent request."""
        self._request.Free()
