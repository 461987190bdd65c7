"""Measurements of methods between nodes, on ranks that are threads, and their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apps.performance.cluster.tables import NOTHING
from apps.performance.cluster.two_levels import (
    COPIES,
    MEASUREMENT,
    PER_NODE,
    PER_NODE_DENSE,
    contenders,
    measure_here,
    render,
)
from collectives import Torus
from mpicomp import run_local


def record(ranks: int, which: str, per_node: int, repeats: int = 2) -> dict[str, Any]:
    work = run_local(
        ranks, lambda comm: measure_here(comm, 20_000, repeats, which), topology="ring", ranks_per_node=per_node
    )
    return work[0] | {"settings": {"nodes": ranks // per_node, "rate": "1gbit", "between": "none"}, "links": []}


def test_every_way_is_timed_and_predicted() -> None:
    found = record(4, "speed", 2)
    names = [one.name for one in contenders(2, 2)]
    assert list(found["rows"]) == names
    assert {PER_NODE, "Marsit ring", "Marsit torus", "Marsit star", PER_NODE_DENSE, "dense ring"} <= {*names}
    assert all(0 < row["predicted_s"] < 60 for row in found["rows"].values())
    told = render([found])
    assert told.startswith("**2 nodes of 2 ranks, 1gbit**")
    assert "\nPerNode(Marsit) is " in told


def test_a_torus_has_a_row_per_node_too() -> None:
    assert [one.topology for one in contenders(4, 2) if "row" in one.name] == [Torus(4, 2)]
    assert not [one for one in contenders(2, 2) if "row" in one.name]  # it is the most square one


def test_bytes_are_counted_for_several_numbers_of_ranks_a_node() -> None:
    told = render([record(2, "bytes", 1), record(4, "bytes", 2)])
    assert "| nodes | ranks a node | PerNode(Marsit), MB | Marsit ring, MB | PerNode(dense), MB |" in told
    assert [line[:9] for line in told.splitlines() if line.startswith("| 2 ")] == ["| 2 | 1 |", "| 2 | 2 |"]


def test_sums_of_one_node_are_compared_with_copies() -> None:
    found = record(2, "memory", 2)
    assert list(found["rows"]) == [COPIES, PER_NODE_DENSE, "dense ring", "MPI"]
    found["rows"][COPIES]["median_s"], found["rows"][PER_NODE_DENSE]["median_s"] = 0.9, 1.0
    assert "PerNode(dense) has 90% of the speed of two copies (target: 80%)." in render([found])
    found["rows"][COPIES]["median_s"] = 0.5
    assert "PerNode(dense) has 50% of the speed of two copies (target: 80%, missed)." in render([found])


def test_records_have_names_of_their_own(tmp_path: Path) -> None:
    jobs = [*MEASUREMENT.jobs(tmp_path)]
    assert len({job.name for job in jobs}) == len(jobs) == 9
    assert render([]) == NOTHING


@pytest.mark.parametrize(("ratio", "missed"), [(1.6, False), (1.4, True)])
def test_the_best_topology_is_compared_with(ratio: float, missed: bool) -> None:
    found = record(4, "speed", 2)
    for row in found["rows"].values():
        row["median_s"] = 9.0
    found["rows"]["Marsit torus"]["median_s"], found["rows"][PER_NODE]["median_s"] = ratio, 1.0
    told = render([found])
    assert f"{ratio:.2f} times as fast as Marsit torus (target: 1.5{', missed' * missed})" in told
