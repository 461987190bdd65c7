"""A plan made ready to run: one rank's messages piece by piece, and what each piece goes through in which order.

Compiled once per (plan, cut) and used for every call; no MPI in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collectives.execution.partition import partition, pieces
from collectives.schedules.plan import Plan, PlanError


@dataclass(frozen=True, slots=True)
class Message:
    """One piece to or from one peer.

    Attributes
    ----------
    index : int
        Its number among this rank's sends, or among its receives.
    piece : int
        Number of the piece.
    peer, weight, held_weight : int
        As in `Transfer`; ``held_weight`` 0: a receive overwrites.
    ordinal : int
        How many merges this rank has made into the piece before this one.
    step, chunk : int
        Where in the plan it comes from, for error messages.
    is_send : bool
        Direction.
    """

    index: int
    piece: int
    peer: int
    weight: int
    held_weight: int
    ordinal: int
    step: int
    chunk: int
    is_send: bool


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Program:
    """One rank's all-reduce of one vector length.

    Attributes
    ----------
    plan : Plan
        What was compiled.
    pieces : tuple of range
        Elements of each piece.
    chains : tuple of tuple of Message
        Per piece, its messages in plan order.
    sends, recvs : tuple of Message
        All of them in plan order.
    encode_order : tuple of int
        Pieces in the order in which they are first needed.
    peers_in : tuple of int
        Ranks that this one receives from.
    last_recv : tuple of int
        Per piece, where in its chain the last receive is, after which it is final; -1: none.
    steps : tuple of (tuple of Message, tuple of Message)
        Sends and receives of each step of the plan.
    most_landing : int
        Messages to be merged that one step receives, at most.
    """

    plan: Plan
    pieces: tuple[range, ...]
    chains: tuple[tuple[Message, ...], ...]
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    encode_order: tuple[int, ...]
    peers_in: tuple[int, ...]
    last_recv: tuple[int, ...]
    steps: tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]
    most_landing: int

    @property
    def longest_piece(self) -> int:
        """Elements."""
        return max(map(len, self.pieces), default=0)


def compile_plan(plan: Plan, n: int, alignment: int, piece_elements: int) -> Program:
    """Cut `n` elements for a plan and lay out its messages.

    Parameters
    ----------
    plan : Plan
    n : int
        Elements of the vector.
    alignment : int
        Chunks and pieces start at multiples of it.
    piece_elements : int
        Longest piece wanted; equal on all ranks, like everything here.
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
        steps.append((tuple(sends[before[0] :]), tuple(recvs[before[1] :])))
    return Program(
        plan,
        tuple(cut),
        tuple(map(tuple, chains)),
        tuple(sends),
        tuple(recvs),
        tuple(first_use) + tuple(piece for piece in range(len(cut)) if piece not in first_use),
        tuple(dict.fromkeys(message.peer for message in recvs)),
        tuple(max((i for i, m in enumerate(chain) if not m.is_send), default=-1) for chain in chains),
        tuple(steps),
        max((sum(m.held_weight > 0 for m in received) for _, received in steps), default=0),
    )
