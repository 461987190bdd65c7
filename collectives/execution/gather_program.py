"""All-gather as a data flow of pieces: see `collectives.schedules.all_gather` for the schedule.

Piece k makes its hop s at time k + s of one common timetable, so own pieces and those of others alternate once the
first have come round.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.execution.program import Message, Program
from collectives.schedules.all_gather import AllGather


def gather_program(rank: int, size: int, cuts: Sequence[range]) -> Program:
    """Rank `rank`'s part of an all-gather of one payload a rank, cut into pieces.

    Parameters
    ----------
    rank, size : int
    cuts : sequence of range
        The elements of each piece; the same on all ranks.

    Returns
    -------
    Program
        Piece ``origin * len(cuts) + k`` is rank `origin`'s piece k, and only a rank's own are encoded. `Plan` chunk:
        the origin. A receive overwrites.
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
    for message in recvs:  # a piece comes in before it goes on
        chains[message.piece].append(message)
    for message in sends:
        chains[message.piece].append(message)
    return Program(
        AllGather().plan(rank, size),
        tuple(cuts) * size,
        tuple(map(tuple, chains)),
        tuple(sends),
        tuple(recvs),
        tuple(range(rank * count, (rank + 1) * count)),
        (left,) if recvs else (),
        tuple(0 if chain and not chain[0].is_send else -1 for chain in chains),
        tuple((tuple(out), tuple(into)) for out, into in steps),
        0,
    )
