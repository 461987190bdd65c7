"""Survivors of which some have yet to make users that others have. Jobs are in ``tests/unit/faults``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from collectives.nodes.layout import NodeLayout
from collectives.recovery.commit_rule import CallReport
from collectives.recovery.regrouping import Regrouping, SurvivorReport


def report(n_users: int, *layouts: tuple[int, ...]) -> SurvivorReport:
    return SurvivorReport(CallReport(0, [], []), False, False, [], n_users, [*layouts])


def test_survivors_make_the_nodes_that_users_need_which_some_have_yet_to_make() -> None:
    made = list[NodeLayout]()
    layout = NodeLayout((0, 0, 1, 1), 2)
    comm: Any = SimpleNamespace(
        here="rank 2 of 4", layout=layout, hosts=layout, levels={}, rank=1, nodes_of=made.append,
        mpi_comm=SimpleNamespace(Get_group=lambda: None), missing=SimpleNamespace(another_failed=False),
    )  # fmt: skip
    regroup: Any = SimpleNamespace(comm=comm, members=range(4), unrepeated={})
    reports = [report(1, (0, 1, 0, 1)), report(0), report(1, (0, 1, 0, 1))]
    assert Regrouping(regroup)._renew_users([], reports, (1, 2, 3)) == []
    assert made == [NodeLayout((0, 1, 0), 1)]  # of ranks 1 to 3, which are 0 to 2 now
