"""Progress thread, which drives calls in the background while the caller computes.

MPI makes progress only while it is called, so some thread has to poll. Only the progress thread uses a communicator
that is assigned to it: other threads submit calls, and later wait for their ends. All communicators of a process share
one thread, and calls begin in the order of submission.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from mpi4py import MPI

from collectives.progress import polling
from collectives.transports import has_processes

if TYPE_CHECKING:
    from collectives.execution.call import Call

SPINS = 8  # turns without progress before the thread sleeps or yields; other threads compute on the same cores
NAP_S = 0.00005
LONG_NAP_S = 0.0005
PATIENT = 2000  # turns without progress before its sleep becomes long, even if threads wait
STOPPING_S = 2.0  # longest wait for the thread at the end of the process
AHEAD = 32  # calls of a communicator that are driven at once; thousands may be in flight, and most would only wait
LOOK_S = 1.0  # period of a waiting thread's checks that this one is alive


class Completion:
    """End of a call that another thread drives."""

    __slots__ = ("_call", "_callbacks", "_ended", "_thread")

    def __init__(self, call: Call, thread: ProgressThread) -> None:
        self._call: Call | None = call
        self._thread = thread
        self._ended = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def wait(self) -> None:
        """Sleep until the call has ended or is lost; RuntimeError in the progress thread itself."""
        if self._ended.is_set():
            return
        self._thread.reject_waiting(lambda: "a call")
        try:
            with self._thread.hurrying():
                while not (self.lost or self._ended.wait(LOOK_S)):
                    if polling.answer_others is not None:
                        polling.answer_others(None)
        # such as KeyboardInterrupt: it ends the call
        except BaseException as error:
            self._thread.submit(partial(self._interrupt, error))
            self._ended.wait(STOPPING_S)
            raise

    @property
    def lost(self) -> bool:
        """Return whether no thread drives the call to its end: in a forked process, or as the program ends."""
        return not (self._ended.is_set() or self._thread.is_alive())

    def then(self, callback: Callable[[], None]) -> None:
        """Register a callback for the progress thread to call once the call has ended; its errors are uncaught."""
        self._callbacks.append(callback)
        if self._ended.is_set():
            self._thread.submit(self._run_callbacks)

    def finish(self) -> None:
        """Wake the threads that wait; the progress thread calls this."""
        self._call = None  # breaks a cycle of references, as the call refers to its completion
        self._ended.set()
        if self._callbacks:
            self._thread.submit(self._run_callbacks)

    def _interrupt(self, error: BaseException) -> None:
        if self._call is not None:
            self._call.end_by(error)

    def _run_callbacks(self) -> None:
        while self._callbacks:  # `then` and `finish` may both have submitted this: each callback runs once
            _report_errors(self._callbacks.pop(0))


class ProgressThread:
    """Thread that begins and advances calls; a process has one: see `shared`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._waiting: list[None] = []  # an entry per waiting thread; changed by single operations, without a lock
        self._thread = threading.Thread(target=self._drive, name="mpicomp progress", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before mpi4py ends MPI, which waits for exit handlers of Python

    def submit(self, task: Callable[[], object]) -> None:
        """Submit a task that the thread runs between two turns, in the order of submission."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def flush(self) -> None:
        """Wait until everything submitted before has been begun."""
        if self.is_current():
            return
        begun = threading.Event()
        self.submit(begun.set)
        while not begun.wait(LOOK_S) and self.is_alive():
            pass

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Suspend short sleeps while the caller waits, since it leaves its core to this thread."""
        self._waiting.append(None)
        try:
            yield
        finally:
            self._waiting.pop()

    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def reject_waiting(self, name: Callable[[], str]) -> None:
        """Raise RuntimeError in a callback, where nothing may wait."""
        if self.is_current():
            raise RuntimeError(
                f"a callback cannot wait for {name()}: begin the call, and go on in a callback of its own"
            )

    def is_alive(self) -> bool:
        """Return whether the thread drives calls: not in a forked process, and not when the interpreter ends."""
        return self._thread.is_alive() and not self._stopping

    def stop(self) -> None:
        """End the thread; calls in flight stay as they are."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(STOPPING_S)

    def forget(self) -> None:
        """Replace locks, in a forked process, that the thread of the parent may have held at the fork."""
        self._stopping, self._changed = True, threading.Condition()
        self._tasks.clear()

    def _drive(self) -> None:
        calls = polling.calls_of_this_thread()
        driven: list[Call] = []
        chosen = idle_turns = 0
        while True:
            hurries = self._waiting and idle_turns < PATIENT
            if hurries and idle_turns > SPINS:
                os.sched_yield()
            with self._changed:
                if not self._tasks and idle_turns > SPINS and not hurries:
                    self._changed.wait(NAP_S if idle_turns < PATIENT else LONG_NAP_S)
                while not (self._tasks or calls or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                tasks = tuple(self._tasks)
                self._tasks.clear()
            for task in tasks:
                _report_errors(task)
            moved = bool(tasks)
            driven = [call for call in driven if not call.done]
            # chosen again in time, so that no communicator runs out of calls to drive
            if tasks or chosen - len(driven) >= AHEAD // 2:
                driven = select_first_calls(calls)
                chosen = len(driven)
            for call in driven:
                moved |= call.advance()
            idle_turns = 0 if moved else idle_turns + 1


def select_first_calls(calls: Sequence[Call]) -> list[Call]:
    """Return all calls of two ranks, and the first `AHEAD` other calls of each communicator."""
    if len(calls) <= AHEAD:
        return list(calls)
    chosen, taken = [], Counter[int]()
    # Calls of a communicator begin in one order on all ranks. So the first call that has not ended everywhere is among
    # the first ones of every rank that has not done its part, and some call always advances.
    for call in calls:
        group = id(call.group)
        if call.is_pairwise or taken[group] < AHEAD:
            chosen.append(call)
            taken[group] += not call.is_pairwise
    return chosen


def _report_errors(task: Callable[[], object]) -> None:
    """Run a task; its errors end neither the thread nor the calls that it drives."""
    try:
        task()
    except BaseException as error:  # noqa: BLE001 - reported like an error of a thread
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))


_shared: ProgressThread | None = None
_making = threading.Lock()


def shared() -> ProgressThread:
    """Return the process's progress thread; the first call starts it."""
    global _shared
    with _making:
        if _shared is None or not _shared.is_alive():
            _shared = ProgressThread()
        return _shared


def is_supported(comm: object) -> bool:
    """Return whether a thread may drive this communicator: MPI supports threads, and its ranks are processes."""
    return has_processes(comm) and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _after_fork() -> None:
    global _shared, _making
    if _shared is not None:
        _shared.forget()
    _shared, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
