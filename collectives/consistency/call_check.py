"""Comparison of calls among the ranks, before each collective.

Ranks compare 62 bits that stand for the call (`recursive_doubling`); a small dense sum travels in the same messages.
If the bits differ, the ranks exchange descriptions, and all raise the same error. Checks are numbered in the order in
which the calls begin. Several checks, each with a tag of its own, are under way at once, and none waits for an earlier
call to end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from collectives import tags
from collectives.annotations import AnyArray
from collectives.arrays.elements import Combine, add
from collectives.consistency.descriptions import MARK_BITS, Description, difference
from collectives.consistency.missing_ranks import MissingRanks
from collectives.consistency.recursive_doubling import DIFFERENT, RecursiveDoubling, rounds_of
from collectives.errors import CollectiveMismatch
from collectives.execution.call import Call, Steps
from collectives.execution.traffic import Traffic
from collectives.progress.polling import until
from collectives.quoting import list_ranks

AT_ONCE = 8  # checks under way; the check of a call waits for the check 8 calls before
RECEIVE_EACH = 64  # calls; a rank that is always the last never waits, and would never answer questions otherwise
TAG, TEXT_TAG = tags.CHECKS_OF_CALLS.start, tags.DESCRIPTIONS_OF_CALLS.start  # lowest ones, also of descriptions
CLOSES = b"\0"  # last byte of a description if its rank cannot use the communicator after a mismatch


class CallCheck:
    """Comparison of the calls of one communicator, which may sum vectors of `most_bytes` at most on the way."""

    def __init__(self, comm: MPI.Comm, missing: MissingRanks, most_bytes: int = 0, has_checksums: bool = False) -> None:
        # it counts the calls that this rank comes to in `missing`, and sets its partners there
        self._comm, self._missing, self.most_bytes, self.has_checksums = comm, missing, most_bytes, has_checksums
        self._here = f"rank {comm.rank} of {comm.size}"
        self._numbers = [one or AT_ONCE for one in range(AT_ONCE)]  # number of the call that uses each tag now, or next
        self._exchanges: list[RecursiveDoubling] = []
        missing.partners = {one.peer for one in rounds_of(comm.rank, comm.size)}
        self._idle: list[RecursiveDoubling] = []  # the last one is reused first: its memory is in the cache
        # By number: the error of a call in which the ranks differ, None until all descriptions have come. Where the
        # ranks go on after it, later calls raise their own.
        self._mismatches: dict[int, CollectiveMismatch | None] = {}

    def enter(self, call: Call) -> None:
        """Give a call its number, unless it has one."""
        if not call.number:
            self._missing.calls += 1
            call.number = self._missing.calls

    def steps(
        self,
        call: Call,
        mark: int,
        traffic: Traffic | None = None,
        values: AnyArray | None = None,
        sums: AnyArray | None = None,
        meanwhile: Callable[[], None] | None = None,
        combine: Combine = add,
    ) -> Steps:
        """Compare a call with those of the other ranks, and sum vectors on the way; CollectiveMismatch: they differ."""
        # numbers must be given in the order in which the calls begin
        self.enter(call)
        number = call.number
        if self._comm.size > 1:
            if not number % RECEIVE_EACH:
                self._missing.receive_messages()
            call.arrival = number
            # the name is computed only if the ranks differ or do not come
            call.describe = lambda: self._waiting(number, call.name())
            turn = number % AT_ONCE
            while self._numbers[turn] != number:
                yield False
            exchange = self._idle.pop() if self._idle else self._another()
            # Vectors have equal lengths and types on ranks with equal marks. The sums are written only if all ranks
            # agree; they may be the values.
            exchange.start((mark + number * 0x9E3779B97F4A7C15) & MARK_BITS, values, sums, traffic, TAG + turn, combine)
            # by now the first message is on its way
            if meanwhile is not None:
                meanwhile()
            if not exchange.Test():
                yield from until(exchange, call)
            elif call.idle_turns:
                call.moved()  # ends the stall in which the call waited for its turn
            call.arrival = None
            self._numbers[turn] += AT_ONCE
            self._idle.append(exchange)
            if exchange.mark == DIFFERENT:
                yield from self._raise_first_mismatch(call, number)
            call.group.calls.history.compare(call)
        elif meanwhile is not None:
            meanwhile()

    def sum(self, call: Call, values: AnyArray, sums: AnyArray, traffic: Traffic) -> Steps:
        """Sum a small vector within a call that the ranks have compared; the parameters are those of `steps`."""
        call.describe = lambda: f"{self._here}: not all ranks have come to a sum within {call.name()}"
        exchange = self._idle.pop() if self._idle else self._another()
        # one call at a time does so, in the same order on all ranks: they share a tag
        exchange.start(0, values, sums, traffic, TAG + AT_ONCE)
        yield from until(exchange, call)
        self._idle.append(exchange)

    def free(self) -> None:
        """Free persistent requests of MPI."""
        for exchange in self._exchanges:
            exchange.free()
        self._exchanges.clear()
        self._idle.clear()

    def _another(self) -> RecursiveDoubling:
        # over the communicator without checksums, for which its messages have room
        made = RecursiveDoubling(self._missing.comm, self.most_bytes, self.has_checksums)
        self._exchanges.append(made)  # keeps its buffers alive, since MPI may write to them after a call has failed
        return made

    def _waiting(self, number: int, call: str) -> str:
        return (
            f"{self._here}: not all ranks have come to call {number}, {call} "
            "(look for one that stopped or took another branch)"
        )

    def _raise_first_mismatch(self, call: Call, number: int) -> Steps:
        """Raise the error of this call, or of an earlier one in which the ranks differ."""
        self._mismatches[number] = None
        # ranks may wait for their calls in different orders: this check may end before that of an earlier call
        earlier = range(max(1, number - AT_ONCE + 1), number)
        while any(self._numbers[one % AT_ONCE] <= one for one in earlier):
            yield False
        first = min(one for one, error in self._mismatches.items() if error is None or error.closes)
        if first == number:
            yield from self._raise_mismatch(call, number)
        while (error := self._mismatches[first]) is None:
            yield False
        raise CollectiveMismatch(str(error), error.closes)

    def _raise_mismatch(self, call: Call, number: int) -> Steps:
        """Exchange descriptions, and raise the error that they show."""
        comm, tag, mine = self._comm, TEXT_TAG + number % AT_ONCE, call.name()
        call.describe = lambda: (
            f"{self._here}: the ranks differ in collective call {number}, here {mine}, and not all descriptions arrive"
        )
        call.mismatch = mine
        # if one rank cannot use the communicator any more, no rank can
        closes = not call.outlasts_mismatch
        description = mine.wire if isinstance(mine, Description) else mine
        message = np.frombuffer(description.encode() + CLOSES * closes, np.uint8)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        sends = [comm.Isend([message, message.size, MPI.BYTE], rank, tag) for rank in others]
        texts, status = {comm.rank: description}, MPI.Status()
        for rank in others:
            while not comm.Iprobe(rank, tag, status):
                if self._missing.has_left(rank) and not comm.Iprobe(rank, tag):
                    text = self._missing.mismatch or f"{call.describe()}: {list_ranks([rank])} left before"
                    raise CollectiveMismatch(text, closes=True)
                yield False
            landed = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            yield from until(comm.Irecv([landed, landed.size, MPI.BYTE], rank, tag), call)
            texts[rank], their_end = read_description(bytes(landed))
            closes |= their_end
        for send in sends:
            yield from until(send, call)
        error = CollectiveMismatch(
            f"the ranks differ in collective call {number}{difference(texts)}. "
            "Make the same calls in the same order with the same shapes, dtypes and options on every rank",
            closes,
        )
        self._mismatches[number] = error
        raise error


def read_description(message: bytes) -> tuple[str, bool]:
    """Return the description of another rank's call, and whether that rank can no longer use the communicator."""
    # damaged bytes become replacement characters: the mismatch is reported nevertheless
    return message.removesuffix(CLOSES).decode(errors="replace"), message.endswith(CLOSES)
