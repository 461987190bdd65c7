"""Search for missing ranks, while a rank waits for others to come to a call, and once it has given up waiting.

A collective that does not go on shows that some rank is missing, but not which one. So a rank that has waited for long
sends a question to the other ranks. Ranks that wait too, in whichever call, answer with the number of calls that they
have come to; a rank that does not answer is missing. In the same way a rank that gives up notifies the other ranks,
which then give up as well, and a rank whose program ends notifies those that would wait for it. If the cause is a
mismatch, its text goes with the message: the other ranks may have no part in the call that it was found in, and raise
the same error. While all ranks come in time nothing is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.consistency.recursive_doubling import rounds_of
from collectives.errors import CollectiveMismatch
from collectives.progress.polling import SLEEP_S

TAG = 0  # used for nothing else
ANSWER_S = 1.0  # how long answers are awaited
ANSWER_PART = 0.25  # and at most this part of the timeout
LONGEST_TEXT = 2000  # bytes of a mismatch
# Kinds of messages. The number of calls that the sender has come to and the text of a mismatch follow.
_IS_HERE, _ASKS, _GIVES_UP, _LEAVES = range(4)
_HEAD = np.dtype(np.int64)


class MissingRanks:
    """What the ranks of one communicator tell each other beside their calls.

    Parameters
    ----------
    comm : MPI.Comm
    timeout_s : float
        After which ranks give up.

    Attributes
    ----------
    calls : int
        How many calls this rank has come to; their check counts them.
    delay_s : float
        How much later than rank 0 this rank asks, which it need not where a lower one has asked.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        self._comm, self._patience_s = comm, min(ANSWER_S, ANSWER_PART * timeout_s)
        self.delay_s = self._patience_s * comm.rank / comm.size
        self.calls = 0
        self._sent, self._heard = np.zeros((2, comm.size), np.int64)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        # by rank: how many calls it had come to when it told so, when it left, and when this rank told it
        self._here: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._told: dict[int, int] = {}
        self._mismatches: dict[int, str] = {}  # by rank: why it left or gave up; no entry for other causes
        self._gave_up: set[int] = set()
        self._announced = self._silent = self._asks = False
        self._asked_by_lower = 0
        self._requests: list[MPI.Request] = []  # not waited for: a stopped rank takes nothing
        self._hearing, self._telling = threading.Lock(), threading.RLock()  # a progress thread may drive the calls

    def hear(self) -> None:
        """Take what the others have told, and answer those that ask."""
        if not self._hearing.acquire(blocking=False):
            return  # another thread does it, or this one when a signal interrupted it
        try:
            status = MPI.Status()
            while self._comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
                rank, message = status.source, np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self._comm.Recv([message, message.size, MPI.BYTE], rank, TAG)
                self._heard[rank] += 1
                if message.size > _HEAD.itemsize * 2:
                    self._mismatches.setdefault(rank, bytes(message[_HEAD.itemsize * 2 :]).decode(errors="replace"))
                self._take(rank, *message[: _HEAD.itemsize * 2].view(_HEAD).tolist())
        finally:
            self._hearing.release()

    def _take(self, rank: int, what: int, calls: int) -> None:
        if what == _GIVES_UP:
            self._gave_up.add(rank)
        elif what == _LEAVES:
            self._left[rank] = calls
        else:
            self._here[rank] = calls
            if what == _ASKS:
                if rank < self._comm.rank:
                    self._asked_by_lower = calls
                if self._told.get(rank, 0) < self.calls and not self._silent:
                    self._tell(_IS_HERE, [rank])

    def _tell(self, what: int, ranks: Iterable[int], cause: BaseException | None = None) -> None:
        text = str(cause).encode()[:LONGEST_TEXT] if isinstance(cause, CollectiveMismatch) else b""
        with self._telling:
            self._requests = [request for request in self._requests if not request.Test()]
            message = np.frombuffer(np.array([what, self.calls], _HEAD).tobytes() + text, np.uint8)
            for rank in ranks:
                self._requests.append(self._comm.Isend([message, message.size, MPI.BYTE], rank, TAG))
                self._sent[rank] += 1
                self._told[rank] = self.calls

    # While ranks wait ------------------------------------------------------------------------------------------------

    def ask(self, call: int) -> float:
        """Ask who has come to a call, unless a lower rank has asked; returns when to call `awaited`, in seconds."""
        self._asks = self._asked_by_lower < call
        self._asked_by_lower = 0  # should the lower rank leave the call alone, this one asks next time
        if self._asks:
            self._tell(_ASKS, self._others)
        return self._patience_s

    def awaited(self, call: int) -> str | None:
        """Who has not come to a call, to be added to a warning; None: a lower rank says it."""
        late = [rank for rank in self._others if self._here.get(rank, 0) < call]
        return None if not self._asks else f", nothing from {named(late)}" if late else ""

    def gone(self, call: int) -> str:
        """Who will never come to a call; empty if all may."""
        gone = [rank for rank, calls in sorted(self._left.items()) if calls < call]
        return f"{named(gone)} left by an exception or at the end of the program" if gone else ""

    def has_left(self, rank: int) -> bool:
        """Return whether a rank makes no more calls, as far as this one has received."""
        return rank in self._left or rank in self._gave_up

    def another_gave_up(self) -> bool:
        """Whether another rank has given up."""
        self.hear()
        return bool(self._gave_up)

    @property
    def mismatch(self) -> str:
        """Text of a mismatch for which another rank has left or given up; empty if there is none."""
        return next(iter(self._mismatches.values()), "")

    # At the end ------------------------------------------------------------------------------------------------------

    def leave(self, cause: BaseException | None) -> None:
        """Tell those that would wait for this rank, and by giving up tell the others, that it makes no more calls."""
        with suppress(MPI.Exception):
            self._tell(_LEAVES, {one.peer for one in rounds_of(self._comm.rank, self._comm.size)}, cause)

    def fall_silent(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tell nothing more; returns how many messages went to each rank, and how many have come, which goes on."""
        self._silent = True
        return self._sent, self._heard

    def announce(self, cause: BaseException | None = None) -> None:
        """Tell the others that this rank has given up, so that they give up too and do not take it for missing."""
        if not self._announced:
            self._announced = True
            with suppress(MPI.Exception):  # beyond a rank that MPI knows to be dead
                self._tell(_GIVES_UP, self._others, cause)

    def find(self) -> list[int]:
        """Give up: ranks that do not do so too, in order."""
        deadline = time.perf_counter() + self._patience_s
        self.announce()
        with suppress(MPI.Exception):
            while len(self._gave_up) < len(self._others) and time.perf_counter() < deadline:
                self.hear()
                time.sleep(SLEEP_S)
        return [rank for rank in self._others if rank not in self._gave_up]

    def dead(self) -> list[int]:
        """Ranks that MPI itself knows to have failed; a library without fault tolerance knows none."""
        try:
            failed, everyone = self._comm.Get_failed(), self._comm.Get_group()
            return sorted(MPI.Group.Translate_ranks(failed, group=everyone))
        except (NotImplementedError, AttributeError, MPI.Exception):
            return []


def named(ranks: list[int]) -> str:
    """0, 1, 2, 5 as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s'[: len(ranks) > 1]} {listed}"
