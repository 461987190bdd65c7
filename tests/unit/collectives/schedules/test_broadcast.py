"""Broadcast plans: every chunk reaches every rank once, over links that both ends know."""

from __future__ import annotations

import pytest

from collectives import TopologyError
from collectives.schedules.broadcast import Broadcast
from collectives.schedules.verify import all_plans, deliveries

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 33)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_every_chunk_reaches_every_rank_once_and_goes_on_only_from_there(size: int, chain: bool) -> None:
    for root in {0, 1 % size, size // 2, size - 1}:
        has = {(root, chunk) for chunk in range(3)}
        for message in deliveries(all_plans(Broadcast(root, 3, chain), size)):
            assert (message.weight, message.held_weight) == (size, 0)
            for chunk in message.chunks:
                assert (message.source, chunk) in has, "sent before it was there"
                assert (message.destination, chunk) not in has, "received twice"
                has.add((message.destination, chunk))
        assert has == {(rank, chunk) for rank in range(size) for chunk in range(3)}


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_chain_sends_once_and_a_tree_takes_the_fewest_rounds(size: int) -> None:
    for rank, plan in enumerate(all_plans(Broadcast(1 % size, 5, chain=True), size)):
        sends = [send for step in plan.steps for send in step.sends]
        assert len(sends) == (0 if rank == (1 % size - 1) % size else 5)
    for plan in all_plans(Broadcast(0, 5, chain=False), size):
        assert len(plan.steps) <= (size - 1).bit_length()


def test_a_root_that_is_no_rank_is_refused() -> None:
    with pytest.raises(TopologyError, match="rank 4, which is to send to all others, is not one of 4 ranks"):
        Broadcast(4).plan(0, 4)
