"""Answers of ranks that have left close() to those that are still in it when a rank dies.

A rank leaves close() once all ranks have come, and cannot know whether all others know that. If a rank dies just then,
the others regroup, and wait for all survivors. So a thread stays behind on each rank until all have left: it reports
that the communicator is closed, whereupon the others close it too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.consistency.descriptions import gather_objects
from collectives.consistency.recursive_doubling import rounds_of
from collectives.errors import CollectiveError, DamagedMessage, PeerFailure
from collectives.progress.polling import SLEEP_S, keep_alive
from collectives.recovery.fault_tolerance import CHECK_S, agree, is_revoked, look, may_repeat, revoke

_log = logging.getLogger("collectives")


def barrier(comm: MPI.Comm, tag: int) -> Iterator[list[MPI.Request]]:
    """Pass a barrier of empty messages by recursive doubling: each round's requests must be over before the next."""
    landing = np.empty(0, np.uint8)
    for one in rounds_of(comm.rank, comm.size):
        requests = []
        if one.receives:
            requests.append(comm.Irecv([landing, 0, MPI.BYTE], one.peer, tag))
        if one.sends:
            requests.append(comm.Isend([landing, 0, MPI.BYTE], one.peer, tag))
        yield requests


class Farewell(Thread):
    """Thread of a rank that has left close(), which frees the communicator once all ranks have left.

    Parameters
    ----------
    comm : MPI.Comm
    tag : int
        Tag that no other message of the communicator has.
    report : object
        Report of this rank to ranks that regroup.
    timeout_s : float
        Longest wait for their reports, and at the end of the program.
    unused : sequence of MPI.Comm
        Communicators to free once all ranks have left: this one and its parts, unless requests of them are with MPI.
    checked : callable
        Returns the transport of a communicator, with checksums or without.

    Attributes
    ----------
    is_disturbed : bool
        A rank has died: the thread runs until others regroup, and perhaps for ever.
    keeps : bool
        Set from outside: the communicators are not freed.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        tag: int,
        report: object,
        timeout_s: float,
        unused: Sequence[MPI.Comm],
        checked: Callable[[MPI.Comm], Any],
    ) -> None:
        super().__init__(name="mpicomp: farewell", daemon=True)
        self._comm, self._tag, self._report, self._timeout_s = comm, tag, report, timeout_s
        self._unused, self._checked = unused, checked
        self.is_disturbed = self.keeps = False

    def run(self) -> None:
        """Wait until all ranks have left, or answer those that regroup."""
        requests: list[MPI.Request] = []
        try:
            for requests in barrier(self._comm, self._tag):
                while not all(request.Test() for request in requests):
                    time.sleep(SLEEP_S)
            for one in self._unused:
                if not self.keeps:
                    one.Free()
        except MPI.Exception:
            keep_alive(self._comm, requests)
            self.is_disturbed = True
            try:
                self._await_regrouping()
                self._answer()
            except (MPI.Exception, CollectiveError) as error:
                # this rank has left the communicator, and does without it
                _log.warning("the answer to ranks that close a communicator failed: %s", error)

    def has_ended(self) -> bool:
        """Wait until all ranks have left; False: a rank has died, or does not leave in time."""
        deadline = time.monotonic() + self._timeout_s
        while self.is_alive() and not self.is_disturbed and time.monotonic() < deadline:
            self.join(SLEEP_S)
        return not (self.is_alive() or self.is_disturbed)

    def _await_regrouping(self) -> None:
        while not is_revoked(self._comm):
            with suppress(MPI.Exception):
                look(self._comm)
            time.sleep(CHECK_S)

    def _answer(self) -> None:
        old, has_answered, damages = self._comm, False, list[str]()
        while not has_answered:
            revoke(old)
            new = old.Shrink()
            new.Set_errhandler(MPI.ERRORS_RETURN)
            try:
                gather_objects(self._checked(new), self._report, self._timeout_s)
                is_complete = True
            except (MPI.Exception, PeerFailure, DamagedMessage) as error:
                is_complete = False
                if isinstance(error, DamagedMessage) and not may_repeat(error, new, damages):
                    raise
                revoke(new)
            old, has_answered = new, agree(new, is_complete)
