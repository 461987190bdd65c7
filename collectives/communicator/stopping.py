"""Requests to stop: signals that announce preemption or a time limit, and the ranks' agreement on them.

A batch system announces preemption or a time limit with SIGTERM. Open MPI's ``mpirun`` passes SIGTERM on to the ranks,
but kills them a quarter of a second later and reports a failure. It passes SIGUSR1 on and does no more, so batch
scripts send SIGUSR1. Both signals mean "save and end" here. They may reach the ranks at different moments, or only one
of them, so the ranks agree in a call.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from collectives.arrays.elements import COMBINE
from collectives.consistency.descriptions import fingerprint
from collectives.errors import reword
from collectives.execution.call import Call
from collectives.execution.uncompiled import keep_uncompiled
from collectives.progress.main_thread import NotMainThread, run_in_main_thread
from collectives.trace.flight_recorder import write_all

if TYPE_CHECKING:
    from collectives.group.group import Group

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_NAME = "stop_requested()"
_MARK = fingerprint(_NAME)


class StopSignals:
    """Signals that set `requested` instead of ending this process, while a communicator uses them.

    After the first of these signals the process ignores them while no communicator uses them: Slurm and its launcher
    may send two, and the second must not kill a rank that has saved its state and is about to end.
    """

    def __init__(self) -> None:
        self.requested = False
        self.reported = False  # to the program, which has saved and stopped
        self._came = False  # a signal, at any time
        self._users: WeakSet[Group] = WeakSet()
        self._previous: dict[int, Any] = {}  # handlers, by signal
        self._forks_watched = False

    def watches(self, comm: Group, numbers: Iterable[int]) -> bool:
        """Return True if these signals are noted for this communicator: frameworks replace handlers at their end."""
        return comm in self._users and all(map(self._is_noted, numbers))

    def _is_noted(self, number: int) -> bool:
        return number in self._previous and signal.getsignal(number) == self._note

    def watch(self, comm: Group, numbers: Iterable[int]) -> None:
        """Note these signals until the communicator is closed.

        Raises
        ------
        NotMainThread
            This thread can install no handlers.
        ValueError
            There is no such signal, or a program cannot handle it.
        """
        if self.reported and not self._users:  # a program that goes on after it has stopped, as a notebook does
            self.requested = self.reported = False
        missing = [number for number in numbers if not self._is_noted(number)]
        if missing:
            run_in_main_thread(lambda: self._install(missing))
        self._users.add(comm)

    def release(self, comm: Group) -> None:
        """Restore the handlers from before unless other communicators use these signals, or one has come."""
        if self._previous and set(self._users) == {comm}:
            # otherwise no main thread waits, and a signal restores them, see `_note`
            with suppress(NotMainThread):
                run_in_main_thread(self._restore_unless_requested)
        self._users.discard(comm)

    def report(self) -> None:
        """Note that the program has seen the request, which may have come to another rank."""
        self.requested = self.reported = self._came = True

    def _restore_unless_requested(self) -> None:
        # handlers of signals that have come run in this thread before this line: they are noted
        if not self._came:
            self._restore()

    def _install(self, numbers: list[int]) -> None:
        if not self._previous:
            self._restore_in_children()
        # another rank of this process may have installed some meanwhile
        for number in [one for one in numbers if not self._is_noted(one)]:
            try:
                previous = signal.signal(number, self._note)
            except (OSError, TypeError, ValueError) as error:
                raise ValueError(f"signal {number!r} cannot be handled; pass others, such as signal.SIGUSR1") from error
            self._previous[number] = signal.SIG_DFL if previous is None else previous

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._note:  # else another part of the program has replaced it
                signal.signal(number, handler)

    def _restore_in_children(self) -> None:
        """Let processes that are forked from this one end by the signals: pools end their workers so."""
        if not self._forks_watched:
            self._forks_watched = True
            os.register_at_fork(after_in_child=self._restore)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._users:
            self.requested = self._came = True
            if number in STOP_SIGNALS:
                write_all(number)
        elif not self._came:  # of a communicator that another thread has closed, or that was let go
            self._restore()
            signal.raise_signal(number)


STOP = StopSignals()


@keep_uncompiled
def stop_requested(comm: Group, signals: int | Iterable[int] = STOP_SIGNALS) -> bool:
    """Return True on all ranks once one of these signals has come to any rank; collective, a few microseconds.

    The first call installs the handlers: make it before the first step. From then on the signals do not end the process
    until the communicator is closed, which restores the handlers from before. Once a signal has come, the answer stays
    True, and further signals are ignored to the end of the program, so that they cannot kill a rank that saves. After
    the program has seen it and closed its communicators, later ones start with False.

    Parameters
    ----------
    signals : int or several of them
        Signals that request a stop; by default SIGTERM, and SIGUSR1, which Slurm sends before a time limit to jobs
        with the option (``--signal=B:USR1@60``, see `mpicomp help slurm`).

    Raises
    ------
    RuntimeError
        The first call is made by a thread that is neither the main thread nor a rank of `run_local`. The other ranks
        then raise CollectiveMismatch.
    TypeError, ValueError
        `signals` has a signal that a program cannot handle, as SIGKILL; the others then raise CollectiveMismatch.
    CollectiveMismatch, CollectiveTimeout, PeerFailure

    Examples
    --------
    >>> import mpicomp
    >>> def train(comm):
    ...     for step in range(100):
    ...         if comm.stop_requested():
    ...             return f"saved and stopped before step {step}"
    ...     return "trained to the end"
    >>> mpicomp.run_local(2, train)
    ['trained to the end', 'trained to the end']
    """
    try:
        numbers = (signals,) if isinstance(signals, int) else tuple(signals)
        if not STOP.watches(comm, numbers):
            STOP.watch(comm, numbers)
    except NotMainThread as error:
        cure = "call it once in the main thread, before other threads do"
        comm.reject(RuntimeError(f"{comm.here}, {_NAME}: {error}, and only that can install handlers; {cure}"), _NAME)
    except (TypeError, ValueError) as error:
        comm.reject(reword(error, f"{comm.here}, {_NAME}: {error}"), _NAME)
    values = np.array([STOP.requested], np.int64)
    call, result = Call(comm, _describe), values.copy()
    call.remake = lambda: comm.check(call, _MARK, None, values, result, combine=COMBINE["max"])
    with comm.observe("stop_requested"):
        comm.run(call, call.remake())
    if result[0]:
        # a rank that has had no signal yet ends too, and must not be killed by one that comes late
        STOP.report()
    return bool(result[0])


def _describe() -> str:
    return _NAME
