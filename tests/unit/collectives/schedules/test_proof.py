"""Every topology, at every size and shape, is an all-reduce that cannot deadlock."""

from __future__ import annotations

import pytest

from collectives.schedules.direct import Direct
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TOPOLOGIES
from collectives.schedules.ring import Ring
from collectives.schedules.star import Star
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree, Tree
from collectives.schedules.verify import all_plans, prove

SIZES = range(1, 34)
VARIANTS = [
    *(Ring(2), Ring(5), Tree(1), Tree(3), DoubleTree(1), DoubleTree(5), Star(segments=1), Star(segments=3)),
    *(Direct(1), Direct(4)),
]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_named_topologies_are_proved_at_every_size(name: str) -> None:
    for size in SIZES:
        prove(all_plans(TOPOLOGIES[name](), size))


@pytest.mark.parametrize("topology", VARIANTS, ids=repr)
def test_other_segmentations_are_proved_at_every_size(topology: Topology) -> None:
    for size in SIZES:
        prove(all_plans(topology, size))


@pytest.mark.parametrize("rows", SIZES)
def test_every_torus_shape_is_proved(rows: int) -> None:
    for cols in range(1, 33 // rows + 1):
        prove(all_plans(Torus(rows, cols), rows * cols))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_every_root_of_a_star_is_proved(size: int) -> None:
    for root in range(size):
        prove(all_plans(Star(root), size))


@pytest.mark.parametrize("topology", [HalvingDoubling(), DoubleTree(2), Tree(2)], ids=repr)
@pytest.mark.parametrize("size", [63, 64, 65, 100, 127, 128, 129])
def test_tree_shaped_schedules_are_proved_around_larger_powers_of_two(topology: Topology, size: int) -> None:
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
