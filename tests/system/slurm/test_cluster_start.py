"""A cluster that cannot start at first."""

from __future__ import annotations

import socket

import pytest

from tests.system.slurm import cluster


@pytest.mark.timeout(300)
def test_a_port_that_is_taken_after_it_was_found_free_costs_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = cluster.missing()
    if reason is not None:
        pytest.skip(reason)
    found = cluster.free_ports
    starts = []

    def ports() -> list[int]:
        starts.append(found())
        if len(starts) == 1:
            return [taken.getsockname()[1], *starts[0][1:]]
        return starts[-1]

    monkeypatch.setattr(cluster, "free_ports", ports)
    with socket.create_server(("", 0)) as taken, cluster.open_cluster() as started:
        assert started.states() == {"idle"}
    assert len(starts) >= 2
