"""Whether all ranks make the same call, asked before each collective.

Ranks compare 62 bits that stand for the call, by recursive doubling; a small dense sum travels in the same messages.
If the bits differ, descriptions travel, and every rank raises the same error. Checks are numbered as the calls are
begun, and checks of later calls do not wait for earlier ones: a few of them, each with a tag of its own, are under way
at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.arrays.elements import Combine, add
from collectives.consistency.missing_ranks import MissingRanks, named
from collectives.consistency.recursive_doubling import DIFFERENT, TAG, RecursiveDoubling
from collectives.errors import CollectiveMismatch
from collectives.execution.handle import Call, Steps
from collectives.progress.polling import until, wait
from collectives.trace.traffic import Traffic

AT_ONCE = 8  # checks under way; a later one waits for the check of that many calls before
HEAR_EACH = 64  # calls: a rank that is always the last never waits, and would not hear who has asked for it
TEXT_TAG = 32_200  # and above: of descriptions
CLOSES = b"\0"  # ends the description by a rank that cannot use the communicator after a mismatch
LONGEST_SHOWN = 200  # characters of a description whose details a message leaves out
_BETWEEN_PARTS, _IN_PART = "\x1f", "\x1e"
_MASK = (1 << 62) - 1


class Description(str):
    """The words of a call, and its parts: where ranks differ, the message has the first part that is not the same.

    Parameters
    ----------
    text : str
        All of it, in words.
    kind : str
        Calls of one kind have the same things at the same places.
    parts : sequence of str, or of pairs of str
        Of a pair the first text is compared, and the second one shown.
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
    """62 bits that stand for a description."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK


class CallCheck:
    """The checks of one communicator.

    Parameters
    ----------
    comm : MPI.Comm
    missing : MissingRanks
        Told of each call that this rank comes to.
    most_bytes : int
        Longest vector that may be summed on the way.
    """

    def __init__(self, comm: MPI.Comm, missing: MissingRanks, most_bytes: int = 0) -> None:
        self._comm, self._missing, self._most_bytes = comm, missing, most_bytes
        self._here = f"rank {comm.rank} of {comm.size}"
        self._numbers = [one or AT_ONCE for one in range(AT_ONCE)]  # which call each tag serves now, or next
        self._exchanges: list[RecursiveDoubling] = []
        self._idle: list[RecursiveDoubling] = []  # the one used last is at the end: its memory is in the cache

    def enter(self, call: Call) -> None:
        """Give a call its number, if it has none."""
        if not call.number:
            self._missing.calls += 1
            call.number = self._missing.calls

    def steps(
        self,
        call: Call,
        mark: int,
        traffic: Traffic | None = None,
        values: NDArray[Any] | None = None,
        sums: NDArray[Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
        combine: Combine = add,
    ) -> Steps:
        """Compare a call with what the other ranks call.

        The call gets its number at the first step, if `enter` has not given it one before. Numbers must be given in the
        order in which the calls begin.

        Parameters
        ----------
        call : Call
            Its name is asked for only if the ranks differ or do not come.
        mark : int
            Fingerprint of the call without its number.
        traffic : Traffic, optional
            Counted into.
        values, sums : ndarray, optional
            Numbers to sum on the way, and where the result goes; see `RecursiveDoubling.start`.
        meanwhile : callable, optional
            Called once the first message is on its way.
        combine : Combine
            What takes the place of the sum.

        Raises
        ------
        CollectiveMismatch
            The same text on every rank, with what each group of ranks called.
        """
        self.enter(call)
        number = call.number
        if self._comm.size > 1:
            if not number % HEAR_EACH:
                self._missing.hear()
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
                call.moved()  # its turn has come late
            call.arrival = None
            self._numbers[turn] += AT_ONCE
            self._idle.append(exchange)
            if exchange.mark == DIFFERENT:
                yield from self._tell(call, number)
        elif meanwhile is not None:
            meanwhile()

    def sum(self, call: Call, values: NDArray[Any], sums: NDArray[Any], traffic: Traffic) -> Steps:
        """Sum a small vector within a call on which the ranks have agreed; one call at a time, in one order everywhere.

        Parameters as in `steps`.
        """
        call.describe = lambda: f"{self._here}: not all ranks have come to a sum within {call.name()}"
        exchange = self._idle.pop() if self._idle else self._another()
        exchange.start(0, values, sums, traffic, TAG + AT_ONCE)
        yield from until(exchange, call)
        self._idle.append(exchange)

    def free(self) -> None:
        """Give MPI's resources back."""
        for exchange in self._exchanges:
            exchange.free()
        self._exchanges.clear()
        self._idle.clear()

    def _another(self) -> RecursiveDoubling:
        made = RecursiveDoubling(self._comm, self._most_bytes)
        self._exchanges.append(made)  # where a call fails, MPI goes on writing to its buffers
        return made

    def _waiting(self, number: int, call: str) -> str:
        """Who waits for what."""
        return (
            f"{self._here}: not all ranks have come to call {number}, {call} "
            "(look for one that stopped or took another branch)"
        )

    def _tell(self, call: Call, number: int) -> Steps:
        """Exchange descriptions, and raise what they say."""
        comm, tag, mine = self._comm, TEXT_TAG + number % AT_ONCE, call.name()
        call.describe = lambda: (
            f"{self._here}: the ranks differ in collective call {number}, here {mine}, and not all say what they call"
        )
        call.mismatch = mine
        # a communicator that one rank cannot use any more is of no use to others
        closes = not call.group.tolerates_mismatch(call)
        told = mine.wire if isinstance(mine, Description) else mine
        text = np.frombuffer(told.encode() + CLOSES * closes, np.uint8)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        sends = [comm.Isend([text, text.size, MPI.BYTE], rank, tag) for rank in others]
        texts, status = {comm.rank: told}, MPI.Status()
        for rank in others:
            while not comm.Iprobe(rank, tag, status):
                if self._missing.has_left(rank) and not comm.Iprobe(rank, tag):
                    raise CollectiveMismatch(f"{call.describe()}: {named([rank])} left before", closes=True)
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
    kinds = {tuple(told[1:2]) for told in split.values()}
    if len(kinds) == 1 and kinds != {()}:
        kind = kinds.pop()[0]
        for place in range(2, min(map(len, split.values()))):
            parts = {rank: told[place].split(_IN_PART) for rank, told in split.items()}
            if len({compared for compared, _ in parts.values()}) > 1:
                return f", {kind}: {_listed({rank: shown for rank, (_, shown) in parts.items()})}"
    return f": {_listed({rank: _shortened(*told) for rank, told in split.items()})}"


def _shortened(text: str, *parts: str) -> str:
    return f"{text[:LONGEST_SHOWN]} ..." if parts and len(text) > LONGEST_SHOWN else text


def _listed(texts: Mapping[int, str]) -> str:
    """Return each text behind the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{named(ranks)}: {text}" for text, ranks in ranks_of.items())


def gather_texts(comm: MPI.Comm, text: str, timeout_s: float) -> list[str]:
    """Every rank's text, in rank order, on every rank; collective, with no call of `comm` in flight."""

    def waiting() -> str:
        return f"rank {comm.rank} of {comm.size}: not all ranks say what went wrong (look for one that stopped)"

    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.zeros(comm.size, np.int64)
    wait(comm.Iallgather(np.array([mine.size], np.int64), lengths), timeout_s, waiting)
    everything = np.empty(int(lengths.sum()), np.uint8)
    wait(comm.Iallgatherv(mine, [everything, lengths]), timeout_s, waiting)
    ends = np.cumsum(lengths)
    return [bytes(everything[end - length : end]).decode() for end, length in zip(ends, lengths, strict=True)]
