"""Broadcast plans: every chunk reaches every rank once, over links that both ends know."""

from __future__ import annotations

import pytest

from collectives import TopologyError
from collectives.schedules.broadcast import Broadcast
from collectives.schedules.plan import Plan

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 33)


def plans(topology: Broadcast, size: int) -> list[Plan]:
    return [topology.plan(rank, size) for rank in range(size)]


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_every_chunk_reaches_every_rank_once_and_goes_on_only_from_there(size: int, chain: bool) -> None:
    for root in {0, 1, size // 2, size - 1}:
        if root >= size:
            continue
        made = plans(Broadcast(root, 3, chain), size)
        has = {(root, chunk) for chunk in range(3)}
        at = [0] * size
        # ranks walk their steps in any order; a step is over once all it receives has been sent
        sent: dict[tuple[int, int, int], int] = {}
        for _ in range(1000):
            moved = False
            for rank, plan in enumerate(made):
                if at[rank] == len(plan.steps):
                    continue
                step = plan.steps[at[rank]]
                needed = [(r.peer, rank, chunk) for r in step.recvs for chunk in r.chunks]
                if all(sent.get(key) for key in needed) or not needed:
                    for send in step.sends:
                        assert send.weight == size
                        for chunk in send.chunks:
                            assert (rank, chunk) in has, "sent before it was there"
                            sent[rank, send.peer, chunk] = sent.get((rank, send.peer, chunk), 0) + 1
                    for _, _, chunk in needed:
                        assert (rank, chunk) not in has, "received twice"
                        has.add((rank, chunk))
                    assert not any(recv.held_weight for recv in step.recvs)
                    at[rank] += 1
                    moved = True
            if not moved:
                break
        assert at == [len(plan.steps) for plan in made]
        assert has == {(rank, chunk) for rank in range(size) for chunk in range(3)}
        assert len(sent) == 3 * (size - 1)


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_chain_sends_once_and_a_tree_takes_the_fewest_rounds(size: int) -> None:
    for rank, plan in enumerate(plans(Broadcast(1 % size, 5, chain=True), size)):
        sends = [send for step in plan.steps for send in step.sends]
        assert len(sends) == (0 if rank == (1 % size - 1) % size else 5)
    for plan in plans(Broadcast(0, 5, chain=False), size):
        assert len(plan.steps) <= (size - 1).bit_length()


def test_a_root_that_is_no_rank_is_refused() -> None:
    with pytest.raises(TopologyError, match="rank 4, which is to send to all others, is not one of 4 ranks"):
        Broadcast(4).plan(0, 4)
