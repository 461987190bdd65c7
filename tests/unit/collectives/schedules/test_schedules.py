"""Every topology is an all-reduce without deadlock, has the textbook's costs, and merges every rank fairly."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, log2

import pytest

from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TOPOLOGIES
from collectives.schedules.ring import Ring
from collectives.schedules.star import Direct, Star
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree, Tree
from collectives.schedules.verify import all_plans, deliveries, prove

SIZES = range(1, 34)
# around powers of two, squares and primes: segments repeat the steps of the same plans
FEW_SIZES = (*range(1, 12), 15, 16, 17, 25, 29, 32, 33)
SEGMENTED = (
    *(Ring(2), Ring(5), Tree(1), Tree(3), DoubleTree(1), DoubleTree(5), Star(segments=1), Star(segments=3)),
    *(Direct(1), Direct(4)),
)
CASES: list[tuple[Topology, Sequence[int]]] = [
    *((make(), SIZES) for make in TOPOLOGIES.values()),
    *((topology, FEW_SIZES) for topology in SEGMENTED),
    *((Torus(rows, cols), [rows * cols]) for rows in SIZES for cols in range(1, 33 // rows + 1)),
    *((Star(root), [size for size in (1, 2, 5, 8) if root < size]) for root in range(8)),
    *((tree, (63, 64, 65, 100, 127, 128, 129)) for tree in (HalvingDoubling(), DoubleTree(2), Tree(2))),
]


@pytest.mark.parametrize(("topology", "sizes"), CASES, ids=lambda value: repr(value))
def test_every_topology_is_proved(topology: Topology, sizes: Sequence[int]) -> None:
    """Each rank's numbers must go out and the sums come back: that is the least that an all-reduce can send."""
    for size in sizes:
        cost = prove(all_plans(topology, size))
        assert sum(cost.messages) >= 2 * (size - 1)
        assert (cost.rounds > 0) == (size > 1)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_lone_rank_has_nothing_to_do(name: str) -> None:
    assert TOPOLOGIES[name]().plan(0, 1).steps == ()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_no_chunk_is_merged_into_after_it_was_passed_on(name: str) -> None:
    """Sent chunks may then stay where they are until the complete chunk overwrites them."""
    for size in (2, 5, 8, 12):
        for plan in all_plans(TOPOLOGIES[name](), size):
            passed_on: set[int] = set()
            for step in plan.steps:
                merged = {chunk for recv in step.recvs if recv.held_weight for chunk in recv.chunks}
                assert not merged & passed_on
                passed_on |= {chunk for send in step.sends for chunk in send.chunks}


SHAPES = [(1, 1), (1, 5), (5, 1), (2, 2), (2, 3), (3, 2), (4, 8), (5, 6), (3, 11)]
# where all ranks send equally much: rounds, and messages a round
BALANCED: list[tuple[Topology, int, int, int]] = [
    *((Ring(segments), size, 2 * (size - 1), segments) for segments in (1, 4) for size in range(1, 34)),
    *((Torus(rows, cols), rows * cols, 2 * (rows - 1) + 2 * (cols - 1), 1) for rows, cols in SHAPES),
    *((HalvingDoubling(), 1 << power, 2 * power, 1) for power in range(1, 6)),
]


@pytest.mark.parametrize(("topology", "size", "rounds", "messages"), BALANCED)
def test_every_rank_sends_the_least_possible(topology: Topology, size: int, rounds: int, messages: int) -> None:
    report = prove(all_plans(topology, size))
    assert report.rounds == rounds
    assert set(report.messages) == {rounds * messages}
    assert set(report.chunks_sent) == {2 * (size - 1) * topology.plan(0, size).n_chunks // size}


def test_torus_sends_little_between_rows() -> None:
    rows, cols = 4, 8
    plan = Torus(rows, cols).plan(0, rows * cols)
    between = sum(len(send.chunks) for step in plan.steps for send in step.sends if send.peer % cols == 0)
    assert between == 2 * (rows - 1)


@pytest.mark.parametrize(
    ("size", "shape"), [(1, (1, 1)), (7, (1, 7)), (8, (2, 4)), (12, (3, 4)), (16, (4, 4)), (30, (5, 6))]
)
def test_torus_is_as_square_as_the_size_allows(size: int, shape: tuple[int, int]) -> None:
    assert Torus().shape(size) == shape
    assert Torus(rows=shape[0]).shape(size) == shape
    assert Torus(cols=shape[1]).shape(size) == shape


@pytest.mark.parametrize("size", [3, 5, 6, 7, 11, 31, 33])
def test_halving_doubling_elsewhere_folds_the_extra_ranks_in(size: int) -> None:
    core = 1 << size.bit_length() - 1
    report = prove(all_plans(HalvingDoubling(), size))
    assert report.rounds == 2 * log2(core) + 2
    sent, pairs = report.chunks_sent, 2 * (size - core)
    assert set(sent[1:pairs:2]) == {core}
    assert set(sent[0:pairs:2]) == {2 * (core - 1) + core}
    assert set(sent[pairs:]) <= {2 * (core - 1)}


def test_halving_sends_the_longest_messages_to_neighbours() -> None:
    steps = HalvingDoubling().plan(0, 16).steps
    sent = [(send.peer, len(send.chunks)) for step in steps[:4] for send in step.sends]
    assert sent == [(1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.mark.parametrize("size", range(2, 34))
def test_binomial_tree(size: int) -> None:
    height = ceil(log2(size))
    report = prove(all_plans(Tree(4), size))
    assert report.rounds <= 2 * height
    assert sum(report.chunks_sent) == 2 * (size - 1) * 4
    assert report.chunks_sent[0] == height * 4


def test_binomial_tree_is_as_deep_as_a_power_of_two_makes_it() -> None:
    assert [prove(all_plans(Tree(), 1 << height)).rounds for height in range(6)] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("size", range(2, 34))
def test_double_tree_loads_no_rank_with_more_than_two_vectors(size: int) -> None:
    plans = all_plans(DoubleTree(4), size)
    report, n = prove(plans), plans[0].n_chunks
    assert report.rounds <= 2 * log2(size)
    received = [sum(len(recv.chunks) for step in plan.steps for recv in step.recvs) for plan in plans]
    assert max(report.chunks_sent) <= 2 * n
    assert max(received) <= 2 * n
    assert sum(report.chunks_sent) == 2 * (size - 1) * n


@pytest.mark.parametrize("size", [3, 4, 7, 8, 16, 33])
def test_double_tree_ranks_are_inner_in_one_tree_at_most(size: int) -> None:
    for plan in all_plans(DoubleTree(1), size):
        inner_in = {recv.chunks.start % 2 for step in plan.steps for recv in step.recvs if recv.held_weight}
        assert len(inner_in) <= 1


@pytest.mark.parametrize("topology", [Tree(12), DoubleTree(12)], ids=repr)
def test_trees_bring_early_chunks_down_while_late_ones_go_up(topology: Topology) -> None:
    for plan in all_plans(topology, 8):
        gathers = [i for i, step in enumerate(plan.steps) if any(not recv.held_weight for recv in step.recvs)]
        reduces = [i for i, step in enumerate(plan.steps) if any(send.weight < 8 for send in step.sends)]
        if gathers and reduces:
            assert gathers[0] < reduces[-1]


@pytest.mark.parametrize("size", [2, 5, 8])
def test_star(size: int) -> None:
    report = prove(all_plans(Star(root=1, segments=2), size))
    assert report.rounds == 2
    assert report.chunks_sent == tuple(2 * (size - 1) if rank == 1 else 2 for rank in range(size))


def test_star_merges_in_rank_order() -> None:
    plan = Star(root=2, segments=1).plan(2, 5)
    merged = [(recv.peer, recv.held_weight) for step in plan.steps for recv in step.recvs]
    assert merged == [(0, 1), (1, 2), (3, 3), (4, 4)]


def test_star_returns_one_chunk_while_it_receives_the_next() -> None:
    plan = Star(segments=3).plan(0, 4)
    in_both_directions = [step for step in plan.steps if step.sends and step.recvs]
    assert len(in_both_directions) == 2 * 3


def test_a_plan_of_thousands_of_ranks_is_cheap_to_hold() -> None:
    assert len(Ring().plan(17, 4096).steps) == 8190
    assert len(Torus().plan(17, 4096).steps) == 252
    assert len(HalvingDoubling().plan(17, 4096).steps) == 24


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
