"""A plan made ready to run: one rank's messages piece by piece, and what each piece goes through in which order.

Compiled once per (plan, cut) and used for every call; no MPI in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from collectives.execution.partition import partition, pieces
from collectives.schedules.plan import Plan, PlanError
from collectives.schedules.ring import AllGather


@dataclass(frozen=True, slots=True)
class Message:
    """One piece to or from one peer."""

    index: int  # its number among this rank's sends, or among its receives
    piece: int
    peer: int
    weight: int  # as in `Transfer`
    held_weight: int  # as in `Transfer`; 0: a receive overwrites
    ordinal: int  # how many merges this rank has made into the piece before this one
    step: int  # where in the plan it comes from, for error messages, like the chunk
    chunk: int
    is_send: bool


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Program:
    """One rank's all-reduce of one vector length."""

    plan: Plan  # what was compiled
    pieces: tuple[range, ...]  # elements of each
    chains: tuple[tuple[Message, ...], ...]  # per piece, its messages in plan order
    sends: tuple[Message, ...]  # all of them in plan order, like the receives
    recvs: tuple[Message, ...]
    encode_order: tuple[int, ...]  # pieces in the order in which they are first needed
    peers_in: tuple[int, ...]  # ranks that this one receives from
    last_recv: tuple[int, ...]  # per piece, where in its chain the last receive is, after which it is final; -1: none
    steps: tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]  # sends and receives of each step of the plan
    most_landing: int  # messages to be merged that one step receives, at most

    @property
    def longest_piece(self) -> int:
        """Elements."""
        return max(map(len, self.pieces), default=0)


def compile_plan(plan: Plan, n: int, alignment: int, piece_elements: int) -> Program:
    """Cut `n` elements for a plan, at multiples of `alignment`, and lay out its messages.

    `piece_elements` is the longest piece wanted; equal on all ranks, like everything here.
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
        # a send carries the chunk as the step found it, so a step's sends come first
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
    return _laid_out(plan, cut, chains, sends, recvs, encode_order, steps)


def gather_program(rank: int, size: int, cuts: Sequence[range]) -> Program:
    """Rank `rank`'s part of an all-gather of one payload a rank, cut into pieces; see `AllGather` for the schedule.

    `cuts` are the elements of each piece, the same on all ranks. Piece ``origin * len(cuts) + k`` is rank `origin`'s
    piece k, and only a rank's own are encoded. A message's chunk is the origin; a receive overwrites. Piece k makes its
    hop s at time k + s of one common timetable, so own pieces and those of others alternate once the first have come
    round.
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
    return _laid_out(AllGather().plan(rank, size), (*cuts,) * size, chains, sends, recvs, encode_order, steps)


def _laid_out(
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
