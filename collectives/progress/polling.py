"""Waiting without blocking: poll, back off, and give up at the deadline with a reason.

No call into MPI here waits: between two polls Python runs, so signal handlers do too, and a dead peer costs the timeout
instead of for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mpi4py import MPI

from collectives.errors import CollectiveTimeout, PeerFailure
from collectives.progress.keep_alive import keep_alive

SPINS = 64  # polls before the core is offered to others
YIELD_S = 0.05  # how long it is only offered; after that the rank sleeps between polls
SLEEP_S = 0.0005
LONGEST_LOOK_S = 0.5  # between two looks; longer ones were spent elsewhere
WARN_PART = 0.25  # of the timeout: then a stall is logged

_log = logging.getLogger("collectives")
_thread = threading.local()


def rest_by(rest: Callable[[], None] | None) -> Callable[[], None] | None:
    """Let this thread wait by calling `rest`, which sleeps until something may have come; None: by polling.

    Returns
    -------
    callable or None
        What it did before.
    """
    before: Callable[[], None] | None = getattr(_thread, "rest", None)
    _thread.rest = rest
    return before


def spins() -> int:
    """How often to poll before more is done about waiting."""
    return SPINS if getattr(_thread, "rest", None) is None else 1


class Backoff:
    """Backs off while nothing moves.

    Parameters
    ----------
    timeout_s : float
        Seconds without progress after which `idle` raises.
    describe : callable
        Says who waits for what, as in ``"rank 3 of 8, step 5: nothing from rank 2"``.
    hopeless : callable, optional
        Asked between two sleeps: whether to raise before the timeout.
    clock : callable
        What `waited_s` is measured by; the timeout is always of time on the wall.
    """

    __slots__ = (
        "_clock",
        "_describe",
        "_hopeless",
        "_looked",
        "_rest",
        "_spins",
        "_stalled_s",
        "_timeout_s",
        "_warned",
        "since",
        "waited_s",
    )

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[], str],
        hopeless: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._timeout_s, self._describe, self._hopeless, self._clock = timeout_s, describe, hopeless, clock
        self._rest: Callable[[], None] | None = getattr(_thread, "rest", None)
        self._spins, self._warned = 0, False
        self._looked = self._stalled_s = 0.0
        self.since = 0.0  # when nothing began to move, if nothing does
        self.waited_s = 0.0

    def moved(self) -> None:
        """Something happened: start over."""
        if self._spins:
            self.waited_s += self._clock() - self.since
            self._spins, self._warned = 0, False

    def idle(self) -> None:
        """Nothing happened in this turn.

        Raises
        ------
        CollectiveTimeout
            Nothing has happened for too long.
        """
        self._spins += 1
        if self._spins == 1:
            self.since, self._looked = self._clock(), time.perf_counter()
            self._stalled_s = 0.0
        if self._rest is not None:
            self._rest()
        elif self._spins < SPINS:
            return
        else:
            os.sched_yield()
            if self._spins % 16:
                return
        now = time.perf_counter()
        # only time spent looking counts: not what the caller computes meanwhile, nor a job that is suspended
        self._stalled_s += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        stalled_s = self._stalled_s
        if stalled_s < YIELD_S:
            return
        if self._rest is None:
            time.sleep(SLEEP_S)
        if stalled_s > self._timeout_s or self._hopeless():
            raise CollectiveTimeout(f"{self._describe()} after {stalled_s:.3g} s")
        if not self._warned and stalled_s > WARN_PART * self._timeout_s:
            self._warned = True
            _log.warning("%s for %.3g s; giving up after %g s", self._describe(), stalled_s, self._timeout_s)


class Testable(Protocol):
    """What can be polled: MPI's requests, and exchanges of our own."""

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Make progress without waiting; True once it is over."""
        ...


def wait(
    request: Testable, timeout_s: float, describe: Callable[[], str], hopeless: Callable[[], bool] = lambda: False
) -> None:
    """Poll one request until it is done. The parameters are those of `Backoff`.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    try:
        for _ in range(spins()):
            if request.Test():
                return
        backoff = Backoff(timeout_s, describe, hopeless)
        while not request.Test():
            backoff.idle()
    except BaseException as error:
        keep_alive(request)  # and with it its buffers
        if isinstance(error, MPI.Exception):
            raise PeerFailure(f"{describe()}: MPI says {error}") from error
        raise
