"""Search for missing ranks, while a rank waits for others to come to a call, and once it has given up waiting.

A collective that does not go on shows that some rank is missing, but not which one. So a rank that has waited for long
sends a question to the other ranks. Ranks that wait too, in whichever call, answer with the number of calls that they
have come to; a rank that does not answer is missing. In the same way a rank that gives up notifies the other ranks,
which then give up as well, and a rank whose program ends notifies those that would wait for it. If the cause is a
mismatch or a damaged message, its text goes along: the other ranks may have no part in the call that it was found in,
and raise the same error. While all ranks come in time nothing is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import tags
from collectives.errors import CollectiveError, CollectiveMismatch, DamagedMessage
from collectives.progress.polling import SLEEP_S
from collectives.quoting import list_ranks

TAG = tags.ABOUT_MISSING_RANKS.start
ANSWER_S = 0.75  # how long answers are awaited; with it a timeout is reported within a second
ANSWER_PART = 0.25  # and at most this part of the timeout
LONGEST_TEXT = 2000  # bytes of a cause
# Kinds of messages. The number of calls that the sender has come to follows, and the text of the cause.
_ANSWER, _QUESTION, _GIVING_UP, _LEAVING, _DAMAGED, _FAILING, _GIVING_UP_ALONE = range(7)
_HEAD = np.dtype(np.int64)


class MissingRanks:
    """Messages between the ranks of one communicator, outside of its calls, about ranks that are missing."""

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        self.comm, self._timeout_s, self._patience_s = comm, timeout_s, min(ANSWER_S, ANSWER_PART * timeout_s)
        # after rank 0, so that this rank sends no question if a lower one has sent one
        self.delay_s = self._patience_s * comm.rank / comm.size
        self.calls = 0  # that this rank has come to; `CallCheck` counts them
        self.partners: set[int] = set()  # ranks that wait for this one in the check of a call; set by `CallCheck`
        self._sent, self._received = np.zeros((2, comm.size), np.int64)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        # By rank: the number of calls that it had come to when it last sent one, and when it left; and the number that
        # this rank last sent to it.
        self._calls_of: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        self._mismatches: dict[int, str] = {}  # by rank that left or gave up because of one: its text
        self._has_failure = False  # a rank has left by an uncaught exception
        self.damage = ""  # text of a damaged message because of which another rank has given up
        self.error_elsewhere = ""  # text of an error of another rank alone, because of which that has given up
        self._gave_up: set[int] = set()
        self._announced = self._stopped = self._sent_question = False
        self._question_of_lower = 0
        self._requests: list[MPI.Request] = []  # tested and never waited for, since a stopped rank receives nothing
        self._notices: list[MPI.Request] = []
        self._receiving, self._sending = threading.Lock(), threading.RLock()  # a progress thread may drive the calls

    def receive_messages(self) -> None:
        """Receive messages that have arrived, and answer questions."""
        if not self._receiving.acquire(blocking=False):
            return  # another thread is receiving, or this one was interrupted by a signal while receiving
        try:
            status = MPI.Status()
            while self.comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
                rank, message = status.source, np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self.comm.Recv([message, message.size, MPI.BYTE], rank, TAG)
                self._received[rank] += 1
                if message.size < 2 * _HEAD.itemsize:  # damaged: these messages have no checksums
                    continue
                kind, calls = message[: _HEAD.itemsize * 2].view(_HEAD).tolist()
                text = bytes(message[_HEAD.itemsize * 2 :]).decode(errors="replace")
                if kind == _DAMAGED:
                    self.damage = self.damage or text
                elif kind == _GIVING_UP_ALONE:
                    self.error_elsewhere = self.error_elsewhere or text
                elif text:
                    self._mismatches.setdefault(rank, text)
                self._take(rank, kind, calls)
        finally:
            self._receiving.release()

    def _take(self, rank: int, kind: int, calls: int) -> None:
        if kind in (_GIVING_UP, _GIVING_UP_ALONE, _DAMAGED):
            self._gave_up.add(rank)
        elif kind in (_LEAVING, _FAILING):
            self._left[rank] = calls
            self._has_failure |= kind == _FAILING
        else:
            self._calls_of[rank] = calls
            if kind == _QUESTION:
                if rank < self.comm.rank:
                    self._question_of_lower = calls
                if self._answered.get(rank, 0) < self.calls and not self._stopped:
                    self._send(_ANSWER, [rank])

    def _send(self, kind: int, ranks: Iterable[int], cause: BaseException | None = None) -> None:
        known = isinstance(cause, CollectiveMismatch | DamagedMessage)
        alone = f": {type(cause).__name__} of rank {self.comm.rank}: {cause}" if kind == _GIVING_UP_ALONE else ""
        text = (str(cause) if known else alone).encode()[:LONGEST_TEXT]
        with self._sending:
            self._requests = [request for request in self._requests if not request.Test()]
            message = np.frombuffer(np.array([kind, self.calls], _HEAD).tobytes() + text, np.uint8)
            for rank in ranks:
                self._requests.append(self.comm.Isend([message, message.size, MPI.BYTE], rank, TAG))
                self._sent[rank] += 1
                self._answered[rank] = self.calls

    # While ranks wait ------------------------------------------------------------------------------------------------

    def send_question(self, call: int) -> float:
        """Send the others a question: which calls have they come to? Return the seconds to `describe_late`."""
        # a lower rank may have sent it already
        self._sent_question = self._question_of_lower < call
        self._question_of_lower = 0  # this rank sends the next question if the lower rank stops waiting
        if self._sent_question:
            self._send(_QUESTION, self._others)
        return self._patience_s

    def describe_late(self, call: int) -> str | None:
        """Return a part of a warning with the ranks that have not come to a call; None: a lower rank warns."""
        late = [rank for rank in self._others if self._calls_of.get(rank, 0) < call]
        return None if not self._sent_question else f", nothing from {list_ranks(late)}" if late else ""

    def describe_gone(self, call: int) -> str:
        """Return a text with the ranks that have left before a call; empty if all may come."""
        gone = [rank for rank, calls in sorted(self._left.items()) if calls < call]
        return f"{list_ranks(gone)} left by an exception or at the end of the program" if gone else ""

    def has_left(self, rank: int) -> bool:
        """Return whether a rank makes no more calls, as far as this one has received."""
        return rank in self._left or rank in self._gave_up

    def another_gave_up(self) -> bool:
        """Return whether another rank has given up."""
        self.receive_messages()
        return bool(self._gave_up)

    def damage_elsewhere(self) -> str:
        """Return the text of a damaged message because of which another rank has given up, or an empty text."""
        with suppress(MPI.Exception):  # a rank has died
            self.receive_messages()
        return self.damage

    @property
    def mismatch(self) -> str:
        """Text of a mismatch because of which another rank has left or given up, or an empty text."""
        return next(iter(self._mismatches.values()), "")

    # At the end ------------------------------------------------------------------------------------------------------

    def leave(self, cause: BaseException | None, within_call: bool = False) -> None:
        """Notify ranks that would wait for this one that it makes no more calls; they give up and notify the rest."""
        with suppress(MPI.Exception):
            self._send(_LEAVING, self._others if within_call else self.partners, cause)

    def leave_all(self) -> None:
        """Notify all other ranks that an exception ends this one; `notices_received` is True once they know."""
        message = np.array([_FAILING, self.calls], _HEAD).view(np.uint8)
        for rank in self._others:
            with suppress(MPI.Exception):  # a dead rank, or a revoked communicator
                # complete once it is received: after this rank's death MPI delivers no messages of it
                self._notices.append(self.comm.Issend([message, message.size, MPI.BYTE], rank, TAG))

    @property
    def notices_received(self) -> bool:
        """Return True once no living rank has yet to receive the messages of `leave_all`."""
        with suppress(MPI.Exception):
            self._notices = [notice for notice in self._notices if not notice.Test()]
            return not self._notices
        return True

    @property
    def another_failed(self) -> bool:
        """Return True if an uncaught exception has ended another rank, as far as this one has received."""
        with suppress(MPI.Exception):
            self.receive_messages()
        return self._has_failure

    @property
    def n_left(self) -> int:
        """Return the number of ranks that have sent that their programs end."""
        with suppress(MPI.Exception):
            self.receive_messages()
        return len(self._left)

    def stop_sending(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Send no more messages; return how many went to each rank, and how many have come, which is still counted."""
        self._stopped = True
        return self._sent, self._received

    def announce(self, cause: BaseException | None = None) -> None:
        """Notify the other ranks that this one has given up, so that they give up too and do not report it missing."""
        if not self._announced:
            self._announced = True
            known_everywhere = cause is None or isinstance(cause, CollectiveError | MPI.Exception)
            kind = _GIVING_UP if known_everywhere else _GIVING_UP_ALONE
            with suppress(MPI.Exception):  # beyond a rank that MPI knows to be dead
                self._send(_DAMAGED if isinstance(cause, DamagedMessage) else kind, self._others, cause)

    def find(self, is_patient: bool = False) -> list[int]:
        """Give up; return the ranks that do not give up as well, in order: a patient rank waits up to the timeout."""
        deadline = time.perf_counter() + (self._timeout_s if is_patient else self._patience_s)
        self.announce()
        with suppress(MPI.Exception):
            while not all(map(self.has_left, self._others)) and time.perf_counter() < deadline:
                self.receive_messages()
                time.sleep(SLEEP_S)
        return [rank for rank in self._others if rank not in self._gave_up]
