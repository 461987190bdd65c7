"""Plans that cannot be right are refused when they are made, and topologies that do not fit name those that do."""

from __future__ import annotations

import pytest

from collectives.schedules.plan import Plan, PlanError, Step, TopologyError, Transfer, steps_by_time
from collectives.schedules.registry import TOPOLOGIES, topology
from collectives.schedules.ring import Ring
from collectives.schedules.star import Star
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree, Tree


def send(peer: int = 1, chunks: range = range(1), weight: int = 1) -> Transfer:
    return Transfer(peer, chunks, weight)


@pytest.mark.parametrize(
    ("chunks", "weights", "problem"),
    [
        *((run, (1, 0), "run of chunk numbers") for run in (range(0), range(3, 3), range(0, 4, 2), range(3, 0, -1))),
        (range(-1, 2), (1, 0), "run of chunk numbers"),
        *((range(1), weights, "at least one rank") for weights in ((0, 0), (-1, 1), (1, -1))),
    ],
)
def test_transfers_move_a_run_of_chunks_for_somebody(chunks: range, weights: tuple[int, int], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Transfer(1, chunks, *weights)


@pytest.mark.parametrize(
    ("sends", "recvs", "problem"),
    [
        ((), (), "at least one transfer"),
        ((Transfer(1, range(1), 1, 1),), (), "merges nothing, yet its held_weight is 1"),
        ((send(chunks=range(0, 3)),), (send(chunks=range(2, 4)),), "sent while"),
        ((), (send(1, range(0, 2)), send(2, range(1, 2))), "overlap"),
    ],
)
def test_steps_that_cannot_be_are_refused(
    sends: tuple[Transfer, ...], recvs: tuple[Transfer, ...], problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        Step(sends, recvs)


def test_steps_may_send_a_chunk_to_several_peers() -> None:
    assert len(Step((send(1), send(2)), ()).sends) == 2


@pytest.mark.parametrize(
    ("transfer", "problem"),
    [
        (send(peer=0), "rank 0 cannot be its peer"),
        (send(peer=4), "rank 4 cannot be its peer"),
        (send(chunks=range(2, 5)), "beyond the 4"),
        (send(weight=5), "more than the 4 ranks"),
        (Transfer(1, range(1), 3, 2), r"weight 3 \+ 2 is more than the 4"),
    ],
)
def test_plans_name_the_rank_and_step_of_a_bad_transfer(transfer: Transfer, problem: str) -> None:
    step = Step((), (transfer,)) if transfer.held_weight else Step((transfer,), ())
    with pytest.raises(PlanError, match=rf"rank 0 of 4, step 1: .*{problem}"):
        Plan(0, 4, 4, (Step((send(),), ()), step))


@pytest.mark.parametrize(("rank", "size", "n_chunks"), [(4, 4, 4), (-1, 4, 4), (0, 0, 1), (0, 1, 0)])
def test_plans_belong_to_a_rank_and_have_chunks(rank: int, size: int, n_chunks: int) -> None:
    with pytest.raises(PlanError):
        Plan(rank, size, n_chunks, ())


def test_timetables_become_steps_in_order_without_idle_ones() -> None:
    a, b, c = send(1), send(2, range(1, 2)), send(3, range(2, 3))
    assert steps_by_time([(7, a), (2, b)], [(7, c)]) == (Step((b,), ()), Step((a,), (c,)))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_names_lead_to_topologies_and_back(name: str) -> None:
    made = topology(name)
    assert made.name == name
    assert made == topology(name)
    assert hash(made) == hash(topology(name))
    assert topology(made) is made


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no topology 'rings'.*ring, segmented-ring, torus"):
        topology("rings")


@pytest.mark.parametrize("torus", [Torus(3, 4), Torus(3), Torus(cols=5), Torus(0, 8)], ids=repr)
def test_a_torus_that_does_not_fit_says_which_do(torus: Torus) -> None:
    with pytest.raises(TopologyError, match=r"8 ranks do not fill .*: 1 x 8, 2 x 4, 4 x 2, 8 x 1"):
        torus.plan(0, 8)


def test_a_star_needs_its_root() -> None:
    with pytest.raises(TopologyError, match="rank 4, but there are only 4"):
        Star(root=4).plan(0, 4)


@pytest.mark.parametrize("make", [Ring, Tree, DoubleTree, lambda n: Star(segments=n), lambda n: Star(root=n - 1)])
def test_segments_and_roots_are_checked_when_given(make: type[Ring]) -> None:
    with pytest.raises(TopologyError):
        make(0)
