"""Where the incoming bit wins with probability weight / (weight + held_weight), every rank wins with exactly 1/M."""

from __future__ import annotations

from fractions import Fraction

import pytest

from collectives.schedules.plan import Topology
from collectives.schedules.registry import TOPOLOGIES
from collectives.schedules.torus import Torus
from collectives.schedules.verify import all_plans, deliveries


def winners(topology: Topology, size: int) -> list[list[list[Fraction]]]:
    """The probability that the bit a rank ends up with in a chunk is that of each rank: [rank][chunk][of rank]."""
    plans = all_plans(topology, size)
    chance = [[[Fraction(of == rank) for of in range(size)] for _ in range(plans[0].n_chunks)] for rank in range(size)]
    for message in deliveries(plans):
        incoming_wins = Fraction(message.weight, message.weight + message.held_weight)
        for chunk in message.chunks:
            incoming, held = chance[message.source][chunk], chance[message.destination][chunk]
            chance[message.destination][chunk] = [
                incoming_wins * a + (1 - incoming_wins) * b for a, b in zip(incoming, held, strict=True)
            ]
    return chance


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13])
def test_every_rank_wins_equally_often(name: str, size: int) -> None:
    for rank in winners(TOPOLOGIES[name](), size):
        for chunk in rank:
            assert chunk == [Fraction(1, size)] * size


@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (2, 3), (3, 2), (4, 3)])
def test_every_rank_of_a_torus_wins_equally_often(rows: int, cols: int) -> None:
    size = rows * cols
    assert winners(Torus(rows, cols), size) == [[[Fraction(1, size)] * size] * size] * size
