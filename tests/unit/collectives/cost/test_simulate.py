"""The modelled time is the textbook's where the textbook has one, and shows what pipelining gains."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from collectives.cost.link import ComputeModel, LinkModel
from collectives.cost.simulate import simulate_time
from collectives.schedules.broadcast import AllGather
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Plan, Topology
from collectives.schedules.registry import TOPOLOGIES
from collectives.schedules.ring import Ring
from collectives.schedules.star import Star
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree, Tree
from collectives.schedules.verify import all_plans, prove

LINK = LinkModel(latency_s=1e-4, bandwidth_bytes_s=1e8)
N = 64 * 12 * 16 * 25
WORK = ComputeModel(2e-9, 1e-9, 3e-9, 1e-6)
MERGE_S = 16e-9  # per element


def float32(n: int, weight: int) -> int:
    return 4 * n


def seconds(topology: Topology, size: int, link: LinkModel = LINK, **options: float) -> float:
    work = ComputeModel(**{name: value for name, value in options.items() if name != "piece_elements"})
    return simulate_time(topology, size, N, float32, link, int(options.get("piece_elements", N)), work)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 12])
def test_ring(size: int) -> None:
    vector_s = 4 * N / LINK.bandwidth_bytes_s
    assert seconds(Ring(), size) == pytest.approx(2 * (size - 1) * (LINK.latency_s + vector_s / size))
    merged = seconds(Ring(), size, merge_s=MERGE_S)
    assert merged - seconds(Ring(), size) == pytest.approx((size - 1) * MERGE_S * N / size)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_in_an_all_gather_each_encodes_its_own_and_decodes_everyones(size: int) -> None:
    vector_s = 4 * N / LINK.bandwidth_bytes_s
    bare = seconds(AllGather(), size)
    assert bare == pytest.approx((size - 1) * (LINK.latency_s + vector_s))
    assert seconds(AllGather(), size, encode_s=3e-9) == pytest.approx(bare + 3e-9 * N)
    assert seconds(AllGather(), size, decode_s=3e-9) == pytest.approx(bare + 3e-9 * N)  # the last alone is waited for
    slow_s = size * vector_s / N  # decoding a vector takes longer than all others' coming
    assert seconds(AllGather(), size, encode_s=1e-9, decode_s=slow_s) == pytest.approx(N * (1e-9 + size * slow_s))
    assert seconds(AllGather(), size, piece_elements=6400) == pytest.approx(bare - (size - 2) * (LINK.latency_s), 0.01)


LATENCY_ALONE = LinkModel(latency_s=1.0, bandwidth_bytes_s=1e30)
BANDWIDTH_ALONE = LinkModel(latency_s=0.0, bandwidth_bytes_s=4 * N)  # a second for the whole vector


@pytest.mark.parametrize(
    ("topology", "size"),
    [
        *((Torus(rows, cols), rows * cols) for rows, cols in ((2, 2), (3, 4), (4, 4))),
        *((HalvingDoubling(), size) for size in (2, 4, 8, 16)),
    ],
    ids=repr,
)
def test_where_only_bandwidth_counts_a_torus_and_halving_take_as_long_as_a_ring(topology: Topology, size: int) -> None:
    assert seconds(topology, size, BANDWIDTH_ALONE) == pytest.approx(2 * (size - 1) / size)


@pytest.mark.parametrize("topology", [Ring(), Torus(), Tree(1), DoubleTree(1), HalvingDoubling(), Star(0, 1)], ids=repr)
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 12, 16])
def test_where_only_latency_counts_time_is_rounds(topology: Topology, size: int) -> None:
    assert seconds(topology, size, LATENCY_ALONE) == pytest.approx(prove(all_plans(topology, size)).rounds)


def test_where_only_bandwidth_counts_a_binomial_tree_is_bound_by_its_root() -> None:
    assert seconds(Tree(segments=1), 16, BANDWIDTH_ALONE) == pytest.approx(2 * 4)


def test_merges_of_a_rank_wait_for_each_other() -> None:
    at_once = LinkModel(latency_s=0.0, bandwidth_bytes_s=1e30)
    assert seconds(Star(segments=4), 4, at_once, merge_s=1 / N) == pytest.approx(3)


def test_no_rank_is_done_before_its_processor() -> None:
    at_once = LinkModel(latency_s=0.0, bandwidth_bytes_s=1e30)
    one_second = 1 / N
    work = {"encode_s": one_second, "merge_s": one_second, "decode_s": one_second}
    # encoding and decoding all of it, merging all but the chunk that a rank begins with
    assert seconds(Ring(), 4, at_once, piece_elements=64, **work) == pytest.approx(2.75, rel=0.01)
    moving = ComputeModel(message_s=1.0, byte_s=1 / 256)
    messages = simulate_time(Star(segments=1), 3, 128, float32, at_once, 64, moving)
    assert messages == pytest.approx(8 + 8)  # two pieces of 256 bytes to and from each of two ranks
    merging = ComputeModel(merge_s=1 / 128)
    alone = simulate_time(Star(segments=1), 3, 128, float32, at_once, 64, merging)
    assert alone == pytest.approx(2)  # two ranks' vectors
    shared = simulate_time(Star(segments=1), 3, 128, float32, at_once, 64, replace(merging, sharing=2.5))
    assert shared == pytest.approx(2.5 * alone)
    shared = simulate_time(Star(segments=1), 3, 128, float32, at_once, 64, replace(moving, sharing=2.5))
    assert shared == pytest.approx(2.5 * messages)


HANDLED_S = 0.03 + 0.64 + 0.5 + 0.03
BY_HAND = {
    # The first tree's chunk: 0 and then 2 to 1, 1 to 3, 3 back to 1, 1 to 0 and then to 2; the second tree likewise.
    "double tree": (DoubleTree(1), 4, 128, LinkModel(0.05, 64), ComputeModel(), 6 * 1.0 + 4 * 0.05),
    # 64 elements are one chunk, which passes log2(size) ranks each way; the other chunks have nothing to send.
    "empty chunks take no time": (
        HalvingDoubling(),
        8,
        64,
        LinkModel(1, 64, overhead_s=0.5),
        ComputeModel(),
        2 * 3 * 2.5,
    ),
    # Two pieces up, one after the other on the link; merged; and down, the first while the second goes up.
    "latency, overhead and bandwidth": (
        *(Star(segments=1), 2, 128, LinkModel(0.5, 100, overhead_s=0.25), ComputeModel(merge_s=0.001)),
        2 * (0.25 + 0.64) + 0.5 + 0.064 + (0.25 + 0.64) + 0.5,
    ),
    # Rank 1 encodes a piece and sends two, 0.64 s each; rank 0 merges the second and sends it back; both decode it.
    "encoding comes before and decoding after": (
        *(Star(segments=1), 2, 128, LinkModel(0.5, 100), ComputeModel(0.002, 0.001, 0.0005)),
        0.128 + 2 * 0.64 + 0.5 + 0.064 + 0.64 + 0.5 + 0.032,
    ),
    # One piece up and down: each way it is handled at both ends, by processors that do all else three times as slowly.
    "a shared processor handles messages": (
        *(Star(segments=1), 2, 64, LinkModel(0.5, 100), ComputeModel(0.001, 0.002, 0.0005, message_s=0.01, sharing=3)),
        3 * 0.064 + HANDLED_S + 3 * 0.128 + HANDLED_S + 3 * 0.032,
    ),
    # Halves within the groups, 1.28 s; then both ranks of a group send a quarter, 0.64 s each, to the other group.
    "messages take turns on a shared uplink": (
        *(HalvingDoubling(), 4, 256, LinkModel(0, 100, group_size=2, uplink_bytes_s=100), ComputeModel()),
        2 * (1.28 + 2 * 0.64),
    ),
}


@pytest.mark.parametrize(("topology", "size", "n", "link", "work", "expected_s"), BY_HAND.values(), ids=BY_HAND)
def test_times_that_can_be_found_by_hand(
    topology: Topology, size: int, n: int, link: LinkModel, work: ComputeModel, expected_s: float
) -> None:
    assert simulate_time(topology, size, n, lambda n, weight: n, link, 64, work) == pytest.approx(expected_s)


def test_pieces_hide_latency_and_merging() -> None:
    whole = seconds(Ring(), 4, merge_s=MERGE_S)
    cut = seconds(Ring(), 4, merge_s=MERGE_S, piece_elements=N / 64)
    wire = 2 * 3 / 4 * 4 * N / LINK.bandwidth_bytes_s
    assert wire <= cut < wire * 1.05
    assert whole > wire * 1.2


@pytest.mark.parametrize("make", [Tree, DoubleTree, Star], ids=["tree", "double-tree", "star"])
def test_segments_pipeline(make: type[Tree]) -> None:
    assert seconds(make(segments=32), 12) < 0.75 * seconds(make(segments=1), 12)


def test_double_tree_approaches_the_bandwidth_of_a_ring() -> None:
    assert 2 < seconds(DoubleTree(64), 16, BANDWIDTH_ALONE) < 2.1


def test_trees_beat_rings_where_latency_rules() -> None:
    ring, *trees = (simulate_time(t, 64, 64, float32, LINK) for t in (Ring(), Tree(), DoubleTree(), HalvingDoubling()))
    assert max(trees) < ring / 3


def test_a_torus_spares_the_slow_links_between_groups() -> None:
    link = LinkModel(1e-9, 1e12, group_size=8, between_latency_s=1e-9, uplink_bytes_s=4 * N)
    # A ring's steps each take a chunk across; a torus takes across what is left after reducing within the groups,
    # but eight columns share the uplink.
    assert seconds(Ring(), 32, link) == pytest.approx(62 / 32, rel=1e-3)
    assert seconds(Torus(4, 8), 32, link) == pytest.approx(8 * 6 / 32, rel=1e-3)
    # All hops of a ring of one group are fast.
    assert seconds(Ring(), 8, link) == pytest.approx(seconds(Ring(), 8, LinkModel(1e-9, 1e12)))


def test_payloads_may_grow_with_the_weight() -> None:
    grown = simulate_time(Ring(), 4, 400, lambda n, weight: n * weight, LinkModel(0.0, 1.0), alignment=1)
    assert grown == pytest.approx(100 * (1 + 2 + 3 + 4 + 4 + 4))


@dataclass(frozen=True)
class PlansOnly:
    """Hides that a topology's ranks act alike, so that its plans are walked one by one."""

    topology: Topology

    @property
    def name(self) -> str:
        return self.topology.name

    def plan(self, rank: int, size: int) -> Plan:
        return self.topology.plan(rank, size)


@pytest.mark.parametrize("topology", [Ring(), Ring(3), Torus()], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 6, 9])
@pytest.mark.parametrize("n", [0, 100, 5000])
def test_all_ranks_at_once_and_one_by_one_take_the_same_time(topology: Topology, size: int, n: int) -> None:
    link = LinkModel(1e-5, 1e8, 1e-6, group_size=3, uplink_bytes_s=1e7)
    together, apart = (simulate_time(t, size, n, float32, link, 64, WORK) for t in (topology, PlansOnly(topology)))
    assert together == pytest.approx(apart, rel=1e-12)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_nothing_to_do_takes_no_time(name: str) -> None:
    def with_header(n: int, weight: int) -> int:
        return 16 + 4 * n

    assert simulate_time(TOPOLOGIES[name](), 1, 1000, with_header, LINK) == 0.0
    assert simulate_time(TOPOLOGIES[name](), 6, 0, with_header, LINK) == 0.0


def test_thousands_of_ranks() -> None:
    size, n = 2048, 64 * 2048
    link = LinkModel(2e-5, 1.25e8)
    ring = simulate_time(Ring(), size, n, float32, link)
    assert ring == pytest.approx(2 * (size - 1) * (link.latency_s + 4 * 64 / link.bandwidth_bytes_s))
