"""Programs: a plan made ready to run, with one rank's messages piece by piece, in the order of each piece.

A program is compiled once per (plan, cut) and used for every call; there is no MPI in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from collectives.schedules.broadcast import AllGather
from collectives.schedules.plan import Plan, PlanError


@dataclass(frozen=True, slots=True)
class Message:
    """One piece to or from one peer."""

    index: int  # number among this rank's sends, or among its receives
    piece: int
    peer: int
    weight: int  # as in `Transfer`
    held_weight: int  # as in `Transfer`; 0: a receive overwrites
    ordinal: int  # number of merges into the piece on this rank before this one
    step: int  # of the plan; for error messages and traces, like the chunk
    chunk: int
    is_send: bool


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Program:
    """One rank's part of an all-reduce, or of another plan, for one vector length."""

    plan: Plan
    pieces: tuple[range, ...]  # elements of each
    chains: tuple[tuple[Message, ...], ...]  # per piece, its messages in plan order
    sends: tuple[Message, ...]  # all of them in plan order, like the receives
    recvs: tuple[Message, ...]
    encode_order: tuple[int, ...]  # pieces in the order in which they are first needed
    peers_in: tuple[int, ...]  # ranks that this one receives from
    last_recv: tuple[int, ...]  # per piece, place of the last receive in its chain, or -1; the piece is final after it
    steps: tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]  # sends and receives of each step of the plan
    most_landing: int  # largest number of messages to be merged that one step receives

    @property
    def longest_piece(self) -> int:
        """Number of elements of the longest piece."""
        return max(map(len, self.pieces), default=0)


def partition(n: int, n_chunks: int, alignment: int) -> tuple[range, ...]:
    """Cut ``n`` elements into ``n_chunks`` neighbouring chunks.

    Chunks start at multiples of ``alignment``. Their lengths, in units of ``alignment``, differ by one at most, so some
    are empty if ``n`` is small. Only the last chunk that is not empty may end between multiples. The result depends on
    the arguments alone, so that every rank computes the same cut.

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    if n < 0 or n_chunks < 1 or alignment < 1:
        raise ValueError(
            f"cannot cut {n} elements into {n_chunks} chunks aligned to {alignment}: "
            "give n >= 0, n_chunks >= 1 and alignment >= 1"
        )
    n_blocks = -(-n // alignment)
    bounds = (min(n, alignment * (n_blocks * chunk // n_chunks)) for chunk in range(n_chunks + 1))
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def pieces(chunk: range, piece_elements: int, alignment: int) -> tuple[range, ...]:
    """Cut one chunk into as few equally long pieces of at most ``piece_elements`` elements as possible.

    Pieces start at multiples of ``alignment`` and are not empty. ``piece_elements`` is rounded down to a multiple of
    ``alignment``, to one multiple at least.

    Raises
    ------
    ValueError
        The chunk does not start at a multiple of ``alignment``, or an argument is out of range.
    """
    if piece_elements < 1 or alignment < 1 or chunk.start % alignment:
        raise ValueError(
            f"cannot cut {chunk} into pieces of {piece_elements} elements aligned to {alignment}: "
            "give positive lengths and a chunk that starts at a multiple of the alignment"
        )
    if not chunk:
        return ()
    n_blocks = -(-len(chunk) // alignment)
    piece_blocks = max(1, piece_elements // alignment)
    return tuple(
        range(chunk.start + part.start, chunk.start + part.stop)
        for part in partition(len(chunk), -(-n_blocks // piece_blocks), alignment)
    )


def compile_plan(plan: Plan, n: int, alignment: int, piece_elements: int) -> Program:
    """Compile a plan: cut `n` elements at multiples of `alignment`, and list the messages of each piece.

    No piece is longer than `piece_elements` elements. All arguments but the plan's rank are equal on all ranks.
    """
    cut: list[range] = []
    of_chunk: list[Sequence[int]] = []
    for elements in partition(n, plan.n_chunks, alignment):
        parts = pieces(elements, piece_elements, alignment)
        of_chunk.append(range(len(cut), len(cut) + len(parts)))
        cut.extend(parts)
    chains: list[list[Message]] = [[] for _ in cut]
    merges, sent = [0] * len(cut), [0] * len(cut)
    sends: list[Message] = []
    recvs: list[Message] = []
    first_use: dict[int, None] = {}
    steps = []
    for number, step in enumerate(plan.steps):
        before = len(sends), len(recvs)
        # sends come first, since a send carries the chunk as it was when the step began
        for transfers, messages in ((step.sends, sends), (step.recvs, recvs)):
            is_send = messages is sends
            for transfer in transfers:
                for chunk in transfer.chunks:
                    for piece in of_chunk[chunk]:
                        message = Message(
                            len(messages), piece, transfer.peer, transfer.weight, transfer.held_weight,
                            merges[piece], number, chunk, is_send,
                        )  # fmt: skip
                        if message.held_weight and not is_send and sent[piece]:
                            raise PlanError(
                                f"rank {plan.rank}, step {number}: chunk {chunk} is merged into after it was sent"
                            )
                        messages.append(message)
                        chains[piece].append(message)
                        first_use[piece] = None
                        sent[piece] += is_send
                        merges[piece] += not is_send and transfer.held_weight > 0
        steps.append((sends[before[0] :], recvs[before[1] :]))
    encode_order = (*first_use, *(piece for piece in range(len(cut)) if piece not in first_use))
    return _lay_out(plan, cut, chains, sends, recvs, encode_order, steps)


def gather_program(rank: int, size: int, cuts: Sequence[range]) -> Program:
    """Return the program of rank `rank` in an all-gather of one payload per rank; see `AllGather` for the schedule.

    `cuts` are the elements of each piece, the same on all ranks. Piece ``origin * len(cuts) + k`` is rank `origin`'s
    piece k, and only a rank's own are encoded. A message's chunk is the origin; a receive overwrites. Piece k makes its
    hop s at time k + s of one common timetable, so that a rank's own pieces alternate with those of other ranks.
    """
    count, left, right = len(cuts), (rank - 1) % size, (rank + 1) % size
    hops = sorted((k + hop, hop, k) for hop in range(size - 1) for k in range(count))
    sends: list[Message] = []
    recvs: list[Message] = []
    chains: list[list[Message]] = [[] for _ in range(size * count)]
    steps: list[tuple[list[Message], list[Message]]] = [([], []) for _ in range(hops[-1][0] + 1 if hops else 0)]
    for time, hop, k in hops:
        for messages, side, peer, origin in ((sends, 0, right, rank - hop), (recvs, 1, left, left - hop)):
            origin %= size
            message = Message(len(messages), origin * count + k, peer, 1, 0, 0, time, origin, side == 0)
            messages.append(message)
            steps[time][side].append(message)
    for message in recvs + sends:  # a piece comes in before it goes on
        chains[message.piece].append(message)
    encode_order = range(rank * count, (rank + 1) * count)
    return _lay_out(AllGather().plan(rank, size), (*cuts,) * size, chains, sends, recvs, encode_order, steps)


def _lay_out(
    plan: Plan,
    cuts: Sequence[range],
    chains: list[list[Message]],
    sends: list[Message],
    recvs: list[Message],
    encode_order: Iterable[int],
    steps: list[tuple[list[Message], list[Message]]],
) -> Program:
    return Program(
        plan,
        tuple(cuts),
        tuple(map(tuple, chains)),
        tuple(sends),
        tuple(recvs),
        tuple(encode_order),
        tuple(dict.fromkeys(message.peer for message in recvs)),
        tuple(max((i for i, m in enumerate(chain) if not m.is_send), default=-1) for chain in chains),
        tuple((tuple(out), tuple(into)) for out, into in steps),
        max((sum(m.held_weight > 0 for m in received) for _, received in steps), default=0),
    )
