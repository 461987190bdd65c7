"""Every topology, at every size and shape, is an all-reduce that cannot deadlock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TOPOLOGIES
from collectives.schedules.ring import Ring
from collectives.schedules.star import Direct, Star
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree, Tree
from collectives.schedules.verify import all_plans, prove

SIZES = range(1, 34)
SEGMENTED = (
    *(Ring(2), Ring(5), Tree(1), Tree(3), DoubleTree(1), DoubleTree(5), Star(segments=1), Star(segments=3)),
    *(Direct(1), Direct(4)),
)
CASES: list[tuple[Topology, Sequence[int]]] = [
    *((topology, SIZES) for topology in (*(make() for make in TOPOLOGIES.values()), *SEGMENTED)),
    *((Torus(rows, cols), [rows * cols]) for rows in SIZES for cols in range(1, 33 // rows + 1)),
    *((Star(root), [size for size in (1, 2, 5, 8) if root < size]) for root in range(8)),
    *((tree, (63, 64, 65, 100, 127, 128, 129)) for tree in (HalvingDoubling(), DoubleTree(2), Tree(2))),
]


@pytest.mark.parametrize(("topology", "sizes"), CASES, ids=lambda value: repr(value))
def test_every_topology_is_proved(topology: Topology, sizes: Sequence[int]) -> None:
    for size in sizes:
        prove(all_plans(topology, size))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_lone_rank_has_nothing_to_do(name: str) -> None:
    assert TOPOLOGIES[name]().plan(0, 1).steps == ()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_no_chunk_is_merged_into_after_it_was_passed_on(name: str) -> None:
    """What was sent may then stay where it is until the complete chunk overwrites it."""
    for size in (2, 5, 8, 12):
        for plan in all_plans(TOPOLOGIES[name](), size):
            passed_on: set[int] = set()
            for step in plan.steps:
                merged = {chunk for recv in step.recvs if recv.held_weight for chunk in recv.chunks}
                assert not merged & passed_on
                passed_on |= {chunk for send in step.sends for chunk in send.chunks}
