"""Comparison of calls among the ranks: before each collective, and before a communicator is made.

Ranks compare 62 bits that stand for the call, by recursive doubling; a small dense sum travels in the same messages.
If the bits differ, the ranks exchange descriptions, and all raise the same error. Checks are numbered in the order in
which the calls begin. Several checks, each with a tag of its own, are under way at once, and none waits for an earlier
call to end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from mpi4py import MPI

from collectives.annotations import AnyArray, Bytes
from collectives.arrays.elements import Combine, add
from collectives.consistency.missing_ranks import MissingRanks, list_ranks
from collectives.consistency.recursive_doubling import DIFFERENT, TAG, RecursiveDoubling
from collectives.errors import CollectiveMismatch, CollectiveTimeout
from collectives.execution.handle import Call, Steps
from collectives.progress.polling import until, wait
from collectives.trace.traffic import Traffic

AT_ONCE = 8  # checks under way; the check of a call waits for the check 8 calls before
RECEIVE_EACH = 64  # calls; a rank that is always the last never waits, and would never answer questions otherwise
TEXT_TAG = 32_200  # lowest tag of descriptions
CLOSES = b"\0"  # last byte of a description if its rank cannot use the communicator after a mismatch
LONGEST_SHOWN = 200  # characters of a description with parts, in a message that cannot name the part
REFUSING_S = 0.5  # how long a rank that refuses waits for ranks that come at the same time
_TAKES_PART, _REFUSES = 1, 2
_BETWEEN_PARTS, _IN_PART = "\x1f", "\x1e"
_MASK = (1 << 62) - 1


class Description(str):
    """Description of a call in words and in parts; the message of a mismatch has the first part that differs.

    Parameters
    ----------
    text : str
        Complete description.
    kind : str
        Kind of call; calls of one kind have the same parts in the same order.
    parts : sequence of str, or of pairs of str
        The first text of a pair is compared, the second one is shown.
    """

    __slots__ = ("wire",)
    wire: str

    def __new__(cls, text: str, kind: str, parts: Sequence[str | tuple[str, str]]) -> Description:
        """Return the text, with its parts."""
        made = super().__new__(cls, text)
        pairs = [(one, one) if isinstance(one, str) else one for one in parts]
        made.wire = _BETWEEN_PARTS.join([text, kind, *map(_IN_PART.join, pairs)])
        return made


def fingerprint(text: str) -> int:
    """Return 62 bits that stand for a description."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK


class CallCheck:
    """Comparison of the calls of one communicator.

    Parameters
    ----------
    comm : MPI.Comm
    missing : MissingRanks
        Its counter of calls is increased for each call that this rank comes to.
    most_bytes : int
        Longest vector that may be summed on the way.
    """

    def __init__(self, comm: MPI.Comm, missing: MissingRanks, most_bytes: int = 0) -> None:
        self._comm, self._missing, self._most_bytes = comm, missing, most_bytes
        self._here = f"rank {comm.rank} of {comm.size}"
        self._numbers = [one or AT_ONCE for one in range(AT_ONCE)]  # number of the call that uses each tag now, or next
        self._exchanges: list[RecursiveDoubling] = []
        self._idle: list[RecursiveDoubling] = []  # the last one is reused first: its memory is in the cache

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
        """Compare a call with the calls of the other ranks.

        The call gets its number at the first step, if `enter` has not given it one before. Numbers must be given in the
        order in which the calls begin.

        Parameters
        ----------
        call : Call
            Its `name` is called only if the ranks differ or do not come.
        mark : int
            Fingerprint of the call without its number.
        traffic : Traffic, optional
            Bytes and messages are added to it.
        values, sums : ndarray, optional
            Numbers to sum on the way, and the array for the result; see `RecursiveDoubling.start`.
        meanwhile : callable, optional
            Called once the first message is on its way.
        combine : Combine
            Operation in place of the sum.

        Raises
        ------
        CollectiveMismatch
            The ranks differ. The text is the same on all ranks, and has the call of each group of ranks.
        """
        self.enter(call)
        number = call.number
        if self._comm.size > 1:
            if not number % RECEIVE_EACH:
                self._missing.receive_messages()
            call.arrival = number
            call.describe = lambda: self._waiting(number, call.name())
            turn = number % AT_ONCE
            while self._numbers[turn] != number:
                yield False
            exchange = self._idle.pop() if self._idle else self._another()
            exchange.start((mark + number * 0x9E3779B97F4A7C15) & _MASK, values, sums, traffic, TAG + turn, combine)
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
                yield from self._raise_mismatch(call, number)
        elif meanwhile is not None:
            meanwhile()

    def sum(self, call: Call, values: AnyArray, sums: AnyArray, traffic: Traffic) -> Steps:
        """Sum a small vector within a call that the ranks have compared.

        One call at a time does so, in the same order on all ranks. The parameters are those of `steps`.
        """
        call.describe = lambda: f"{self._here}: not all ranks have come to a sum within {call.name()}"
        exchange = self._idle.pop() if self._idle else self._another()
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
        made = RecursiveDoubling(self._comm, self._most_bytes)
        self._exchanges.append(made)  # keeps its buffers alive, since MPI may write to them after a call has failed
        return made

    def _waiting(self, number: int, call: str) -> str:
        return (
            f"{self._here}: not all ranks have come to call {number}, {call} "
            "(look for one that stopped or took another branch)"
        )

    def _raise_mismatch(self, call: Call, number: int) -> Steps:
        """Exchange descriptions, and raise the error that they show."""
        comm, tag, mine = self._comm, TEXT_TAG + number % AT_ONCE, call.name()
        call.describe = lambda: (
            f"{self._here}: the ranks differ in collective call {number}, here {mine}, and not all descriptions arrive"
        )
        call.mismatch = mine
        # if one rank cannot use the communicator any more, no rank can
        closes = not call.group.ending.tolerates_mismatch(call)
        description = mine.wire if isinstance(mine, Description) else mine
        text = np.frombuffer(description.encode() + CLOSES * closes, np.uint8)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        sends = [comm.Isend([text, text.size, MPI.BYTE], rank, tag) for rank in others]
        texts, status = {comm.rank: description}, MPI.Status()
        for rank in others:
            while not comm.Iprobe(rank, tag, status):
                if self._missing.has_left(rank) and not comm.Iprobe(rank, tag):
                    raise CollectiveMismatch(f"{call.describe()}: {list_ranks([rank])} left before", closes=True)
                yield False
            landed = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            yield from until(comm.Irecv([landed, landed.size, MPI.BYTE], rank, tag), call)
            closes |= bytes(landed).endswith(CLOSES)
            texts[rank] = bytes(landed).removesuffix(CLOSES).decode()
        for send in sends:
            yield from until(send, call)
        raise CollectiveMismatch(
            f"the ranks differ in collective call {number}{_difference(texts)}. "
            "Make the same calls in the same order with the same shapes, dtypes and options on every rank",
            closes,
        )


def _difference(texts: Mapping[int, str]) -> str:
    """Return the first part in which the descriptions of the ranks differ, or else the whole descriptions."""
    split = {rank: texts[rank].split(_BETWEEN_PARTS) for rank in sorted(texts)}  # as `Description.wire` has them
    kinds = {tuple(text[1:2]) for text in split.values()}
    if len(kinds) == 1 and kinds != {()}:
        kind = kinds.pop()[0]
        for place in range(2, min(map(len, split.values()))):
            parts = {rank: text[place].split(_IN_PART) for rank, text in split.items()}
            if len({compared for compared, _ in parts.values()}) > 1:
                return f", {kind}: {_listed({rank: shown for rank, (_, shown) in parts.items()})}"
    return f": {_listed({rank: _shortened(*text) for rank, text in split.items()})}"


def _shortened(text: str, *parts: str) -> str:
    return f"{text[:LONGEST_SHOWN]} ..." if parts and len(text) > LONGEST_SHOWN else text


def _listed(texts: Mapping[int, str]) -> str:
    """Return each text behind the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{list_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())


def gather_texts(comm: MPI.Comm, text: str, timeout_s: float) -> list[str]:
    """Return every rank's text, in rank order; collective, with no call of `comm` in flight."""

    def waiting() -> str:
        return f"rank {comm.rank} of {comm.size}: not all ranks report their errors (look for one that stopped)"

    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.zeros(comm.size, np.int64)
    wait(comm.Iallgather(np.array([mine.size], np.int64), lengths), timeout_s, waiting)
    everything = np.empty(int(lengths.sum()), np.uint8)
    wait(comm.Iallgatherv(mine, [everything, lengths]), timeout_s, waiting)
    ends = np.cumsum(lengths)
    return [bytes(everything[end - length : end]).decode() for end, length in zip(ends, lengths, strict=True)]


def assemble(parent: MPI.Comm, timeout_s: float) -> None:
    """Wait until all ranks make a communicator, so that later blocking calls of MPI wait for no rank.

    Every rank sends a byte straight to every other, so that the bytes received show which ranks are there. A rank whose
    arguments are wrong sends another byte; see `refuse`.

    Raises
    ------
    CollectiveTimeout
        The named ranks have not come.
    CollectiveMismatch
        The named ranks refuse.
    """
    if parent.size == 1:
        return
    here = f"rank {parent.rank} of {parent.size}"
    request, came = _swap(parent, _TAKES_PART)

    def waiting() -> str:
        missing = [int(rank) for rank in np.flatnonzero(came == 0) if rank != parent.rank]
        nothing = f", nothing from {list_ranks(missing)} (look for one that stopped or took another branch)"
        return f"{here}: not all ranks make a communicator{nothing if missing else ''}"

    wait(request, timeout_s, waiting)
    refusing = [int(rank) for rank in np.flatnonzero(came == _REFUSES)]
    if refusing:
        raise CollectiveMismatch(
            f"{here}: {list_ranks(refusing)} made no communicator, because of an argument; the error there names it"
        )


def refuse(parent: MPI.Comm) -> None:
    """Notify the other ranks that this one makes no communicator; waits briefly for those that come now."""
    if parent.size > 1:
        with suppress(CollectiveTimeout):
            wait(_swap(parent, _REFUSES)[0], REFUSING_S, lambda: "not all ranks make a communicator")


def _swap(parent: MPI.Comm, mine: int) -> tuple[MPI.Request, Bytes]:
    """Send a byte to every rank; return the request, and an array of the bytes received, 0 for ranks that sent none."""
    leaving, landing = np.full(parent.size, mine, np.uint8), np.zeros(parent.size, np.uint8)
    counts = np.ones(parent.size, np.int32)
    return parent.Ialltoallv([leaving, counts, MPI.BYTE], [landing, counts, MPI.BYTE]), landing
