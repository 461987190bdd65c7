"""Jobs of the comparison on the emulated cluster: plans, omissions, times, and checks of results."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from apps.performance.cluster import __main__ as program
from apps.performance.cluster import rounds, vectors
from apps.performance.cluster.driver import Limits
from apps.performance.cluster.grid import Cell, Cluster, by_cluster, default_plan, parse_size, product, size_text
from apps.performance.cluster.implementations import choose, memory_bytes, of_library
from apps.performance.cluster.prepared import Prepared
from apps.performance.cluster.rounds import measure, repeats_for
from apps.performance.cluster.targets import N_BYTES, TARGETS
from collectives import Communicator, Traffic
from mpicomp.cli import timing


def test_sizes_and_clusters_are_read_as_written() -> None:
    assert [parse_size(text) for text in ("4kB", "1.5MB")] == [4000, 1_500_000]
    assert [size_text(nbytes) for nbytes in (4000, 1_500_000)] == ["4kB", "1.5MB"]
    two_level = Cluster.parse(8, "1gbit/100mbit")
    assert (two_level.layout.groups, two_level.bits_per_s, two_level.name) == (2, 100e6, "8x1gbit-100mbit")
    assert Cluster.parse(4, "none").bits_per_s is None
    assert Cluster.parse(4, "1gbit").layout.groups == 1


@pytest.mark.parametrize("size", ["4", "fast", "0kB", "0.001kB", "5GB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(size)


def test_the_default_plan_has_four_nodes_in_full_and_no_cell_twice() -> None:
    plan = default_plan()
    assert len(set(plan)) == len({one.name for one in plan}) == len(plan)
    assert sum(one.cluster.nodes == 4 for one in plan) == 24
    assert {one.cluster.nodes for one in plan} == set(range(2, 9))
    assert {"8x1gbit-100mbit", "2xnone", "8xnone"} < {cluster.name for cluster in by_cluster(plan)}


def test_a_cell_with_targets_has_more_time_unless_all_have_the_same() -> None:
    with_targets = {Cell(Cluster.parse(one.nodes, one.links), N_BYTES) for one in TARGETS}
    assert {one for one in default_plan() if Limits().budget_of(one) == 60} == with_targets
    assert {Limits().budget_of(one) for one in set(default_plan()) - with_targets} == {15}
    assert {Limits(budget_s=2).budget_of(one) for one in default_plan()} == {2}


def test_options_make_a_grid_of_their_own() -> None:
    options = program._parser().parse_args(["--nodes", "2,8", "--sizes", "1MB"])
    assert [one.name for one in program.plan(options)][:2] == ["2x100mbit-1MB", "2x1gbit-1MB"]
    assert len(program.plan(options)) == 8


def test_topologies_that_fit_are_compared() -> None:
    names = {nodes: {one.name for one in of_library("openmpi", nodes)} for nodes in (2, 3, 4, 8)}
    assert "one-bit torus" not in names[2] | names[3]
    assert "one-bit torus" in names[4] & names[8]
    assert {"MPI default", "MPI recursive doubling", "MPI ring", "MPI segmented ring", "MPI Rabenseifner"} < names[2]
    assert "MPI segmented ring, 1 MiB" in names[2]
    assert {one.name for one in of_library("mpich", 4)} == {"one-bit ring", "dense ring", "MPICH"}
    # of which those that are wanted where time is short are timed more often
    assert {one.least for one in of_library("mpich", 4)} == {3}
    assert {one.name: one.least for one in of_library("openmpi", 4)}["dense auto"] == 2


def test_what_takes_too_long_is_left_out_and_the_rest_gives_way_to_what_matters() -> None:
    known, (slow, middle, quick) = of_library("openmpi", 4), product((4,), ("100mbit",), ("400MB", "16MB", "4kB"))
    kept, left_out = choose(known, slow, budget_s=30, longest_s=15)
    assert {one.kind for one in kept} == {"one-bit", "marsit"}
    assert left_out["Gloo"] == "would take 48 s a call"
    kept, left_out = choose(known, middle, budget_s=20, longest_s=15)
    assert {"dense ring", "MPI default", "MPI ring", "Gloo"} < {one.name for one in kept}
    assert left_out["MPI recursive doubling"] == "no time: 2.6 s a call"
    assert choose(known, quick, budget_s=20, longest_s=15) == (known, {})


def test_memory_covers_residuals_of_all_ranks() -> None:
    (cell,) = product((8,), ("none",), ("400MB",))
    assert memory_bytes(of_library("openmpi", 8), cell) > 8 * 5 * 400e6  # input, output, MPI's own, two residuals


def test_calls_are_as_many_as_there_is_time_for() -> None:
    assert repeats_for(0.5, share_s=5, least=3) == 10
    assert repeats_for(60, share_s=5, least=3) == 3
    assert repeats_for(1e-9, share_s=5, least=3) == rounds.MOST_REPEATS


def test_every_implementation_is_checked_once_what_is_slow_is_timed_at_once_and_what_is_quick_is_warmed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    calls: list[str] = []
    checked: list[str] = []
    traffic = Traffic()

    def prepared(name: str, cold_s: float, seconds: float) -> Prepared:
        def call() -> None:
            cold = calls[-1:] != [name]  # something else was called in between
            now[0] += cold_s if cold else seconds
            traffic.bytes_sent += 0 if name == "slow" else 100 if cold else 5
            calls.append(name)

        return Prepared(call, lambda: checked.append(name), traffic if name == "quick" else None)

    def repeats(name: str, seconds: float) -> int:
        asked[name] = seconds
        return {"quick": 6, "slow": 3}[name]

    asked: dict[str, float] = {}
    with Communicator(MPI.COMM_SELF) as comm:
        both = {"quick": prepared("quick", 9, 1), "slow": prepared("slow", 50, 50)}
        found = measure(both, comm, repeats, frozenset({"slow"}))
    assert checked == ["quick", "slow"]
    assert asked == {"quick": 2.0, "slow": 50.0}  # the quick one is called twice in a round
    assert calls[:3] == ["quick", "quick", "slow"]
    assert found["quick"]["times_s"] == [1.0] * 6
    assert calls.count("quick") == 2 + 2 * 6
    assert found["slow"]["times_s"] == [50.0] * 3
    assert calls.count("slow") == 3
    assert found["quick"]["cost"]["bytes_sent"] == 5
    assert found["slow"]["cost"] is None


@pytest.mark.parametrize("spoil", [0, 1_000_002, 1_500_000])
def test_wrong_sums_and_wrong_signs_are_told(spoil: int) -> None:
    x, _ = vectors.make_vectors(1_500_001, rank=0)
    check = vectors.Check(MPI.COMM_SELF)
    signs = np.sign(x)
    check.dense("ours", x)
    check.one_bit("ours", signs)
    x[spoil] += 1e-3
    signs[spoil] *= -1
    with pytest.raises(vectors.WrongResult, match=r"ours: on ranks \[0\] of 1"):
        check.dense("ours", x)
    with pytest.raises(vectors.WrongResult, match="one and the same merge of signs"):
        check.one_bit("ours", signs)
