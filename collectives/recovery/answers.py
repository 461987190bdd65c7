"""Answers to ranks that regroup: a rank that waits elsewhere regroups the same communicators.

A rank that regroups waits for all survivors, which may wait in a call of another communicator. So every rank that waits
also looks for communicators that other ranks have revoked: in a call (`answer_others`), or while it regroups another
communicator itself (`answering`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread, get_ident
from typing import TYPE_CHECKING
from weakref import WeakSet

from mpi4py import MPI

from collectives.progress import polling
from collectives.progress.thread import ProgressThread
from collectives.recovery.fault_tolerance import CHECK_S

if TYPE_CHECKING:
    from collectives.recovery.regroup import Regroup


_watched: WeakSet[Regroup] = WeakSet()  # of the communicators of this process, once they are made


def watch(regroup: Regroup) -> None:
    """Answer from now on, where other ranks regroup this communicator."""
    _watched.add(regroup)
    polling.answer_others = answer_others


def answer_others(group: object) -> bool:
    """Regroup where other ranks do: all communicators but `group`, whose requests fail then.

    Returns
    -------
    bool
        This thread has regrouped a communicator, and perhaps helpers `group`.
    """
    here, watched, has_regrouped = get_ident(), tuple(_watched), False
    if any(one.is_active and one.thread == here for one in watched):
        return False  # a call is a part of it
    for one in watched:
        driven_by = one.comm.calls.driven_by
        is_here = driven_by == here or (isinstance(driven_by, ProgressThread) and driven_by.is_current())
        if is_here and one.comm is not group and one.is_awaited:
            one.answer()
            has_regrouped = True
    _answer_in_drivers()
    return has_regrouped


@contextmanager
def answering(regroup: Regroup) -> Iterator[None]:
    """While a communicator regroups in this block, regroup others of this thread in threads of their own.

    The calls of all of them stand still.
    """
    others = _others_of(regroup)
    idle = [call for one in (regroup, *others) for call in one.comm.calls.in_flight() if not call.busy]
    for call in idle:  # waiting here must not advance them
        call.busy = True
    answers, ended = [_Answer(one) for one in others], Event()
    watcher = Thread(target=_give, args=(answers, ended), name="mpicomp: answers", daemon=True)
    if is_watching := len(_watched) > 1:
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if is_watching:
            watcher.join()
        for call in idle:
            call.busy = False
        for answer in answers:
            answer.settle()


def _others_of(regroup: Regroup) -> list[Regroup]:
    """Return the other communicators that can regroup, and that the same thread drives; none for another thread."""
    calls = regroup.comm.calls
    drives, driver = calls.driven_by, calls.driver
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE or (driver is not None and not driver.is_current()):
        return []
    found = (one for one in tuple(_watched) if one is not regroup and one.comm.calls.driven_by == drives)
    return [one for one in found if one.comm.calls.is_open]


class _Answer:
    """Answer to other ranks that regroup a communicator, in a thread of its own."""

    def __init__(self, regroup: Regroup) -> None:
        self._regroup = regroup
        self._thread: Thread | None = None
        self._error: Exception | None = None

    @property
    def is_under_way(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def give_if_awaited(self) -> None:
        """Start a thread that regroups, if other ranks do."""
        if self._error is None and not self.is_under_way and self._regroup.is_awaited:
            self._regroup.is_active = True
            self._thread = Thread(target=self._run, name="mpicomp: regroup", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._regroup.run_in_helper()
        except Exception as error:  # noqa: BLE001 - `settle` ends the communicator by it
            self._error = error

    def settle(self) -> None:
        """Give up the communicator if its survivors cannot go on."""
        if self._error is not None:
            self._regroup.comm.ending.abort(self._error)


def _give(answers: Sequence[_Answer], ended: Event) -> None:
    """Give answers until the end, and until those that are under way have ended."""
    while not ended.wait(CHECK_S) or any(one.is_under_way for one in answers):
        for one in answers:
            one.give_if_awaited()
        _answer_in_drivers()
        if ended.is_set():
            time.sleep(CHECK_S)


def _answer_in_drivers() -> None:
    """Have progress threads answer, which sleep where they have no calls."""
    for one in tuple(_watched):
        driver = one.comm.calls.driver
        if driver is not None and not driver.is_current() and one.is_awaited:
            driver.submit(one.answer)
