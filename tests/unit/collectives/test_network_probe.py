"""Groups of ranks in a measured network."""

from __future__ import annotations

import pytest

from collectives import LinkModel
from collectives.network_probe import measure_network
from collectives.nodes.layout import NodeLayout
from collectives.threads.run_local import run_local


@pytest.mark.parametrize(
    ("nodes", "each"), [("aabb", 2), ("aaa", 3), ("abc", 1), ("aab", None), ("abab", None), ("aabba", None)]
)
def test_nodes_of_equally_many_neighbours_have_a_size(nodes: str, each: int | None) -> None:
    assert NodeLayout.of_keys(nodes, 0).ranks_of_each == each


def test_nodes_are_groups_where_no_slower_links_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.network_probe._seconds_a_message", lambda comm, peers: 1e-3)

    def measured(ranks_per_node: int) -> LinkModel:
        return run_local(4, measure_network, ranks_per_node=ranks_per_node)[0]

    found = measured(2)
    assert found.group_size == 2
    assert found.uplink_bytes_s == pytest.approx(2 * found.bandwidth_bytes_s)
    assert measured(1).group_size is measured(4).group_size is measured(3).group_size is None
