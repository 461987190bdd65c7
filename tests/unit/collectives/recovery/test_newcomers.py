"""Looks of a rank that waits: their interval, and revocations seen at once. Jobs are in ``tests/unit/faults``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from collectives.nodes.layout import NodeLayout
from collectives.recovery import newcomers
from collectives.recovery.admission import StateTransfer
from collectives.recovery.newcomers import LOOK_S, Newcomers


class Pool:
    """Stands for MPI's communicator of the job. The revocation arrives while a probe makes progress."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.is_revoked, self.probed = rank, size, False, list[int]()

    def Isend(self, *message: Any) -> Any:  # noqa: N802 - MPI's name
        return SimpleNamespace(Free=lambda: None)

    def Iprobe(self, source: int, tag: int) -> bool:  # noqa: N802
        self.probed.append(source)
        self.is_revoked = len(self.probed) == 5
        return False

    def Is_revoked(self) -> bool:  # noqa: N802
        return self.is_revoked


class Alone:
    """Stands for the communicator of a rank that waits."""


def spare(rank: int, hosts: str, n_members: int) -> tuple[Newcomers, Any]:
    layout, pool = NodeLayout.of_keys(hosts, rank), Pool(rank, len(hosts))
    made: Any = pool
    return Newcomers(Alone(), made, (layout, layout), n_members), pool  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "neighbours"), [(2, 2), (4, 3)])
def test_all_ranks_of_a_host_that_wait_look_so_often_together(rank: int, neighbours: int) -> None:
    found, _ = spare(rank, "ababbba", n_members=2)
    assert found._look_s == pytest.approx(neighbours * LOOK_S)
    assert found._look_interval([rank]) == LOOK_S  # the others have joined


def test_a_revocation_is_seen_in_the_look_in_which_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    found, pool = spare(2, "aaa", n_members=2)
    sleeps = list[float]()
    monkeypatch.setattr(newcomers.time, "sleep", sleeps.append)

    def assemble(transfer: StateTransfer) -> None:
        found.is_spare = False

    monkeypatch.setattr(found, "_assemble", assemble)
    found._wait(StateTransfer(list, print, list))
    assert pool.probed == [0, 1, 0, 1, 0]  # one member in each look
    assert sleeps == [LOOK_S] * 4
