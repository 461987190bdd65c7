"""Every message of a call is checked: whichever one is damaged, all ranks raise `DamagedMessage`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import mpicomp
from apps.performance.damaged_messages import CALLS, Case, Damage, DamagedComm, Damager, run, run_undamaged
from collectives import CollectiveMismatch, Communicator, DamagedMessage
from collectives.threads.run_local import run_local
from collectives.threads.thread_comm import LocalComm


@pytest.mark.parametrize("call", sorted(CALLS))
def test_damage_to_any_message_of_a_call_is_found_on_all_ranks(call: str) -> None:
    case = Case(call, "ring", 1000, 3)
    received = run_undamaged(case, True)[1].received
    assert received > 1
    for message in sorted({0, 1, received // 2, received - 1}):
        outcomes = run(case, True, 1, Damage(message, (12_345 + message,)))
        assert [one.error for one in outcomes] == ["DamagedMessage"] * 3, message
        assert all("rank 1 of 3: a message of" in one.text and " bytes from rank " in one.text for one in outcomes)


def test_without_checksums_damage_goes_unnoticed() -> None:
    case = Case("allgather", "ring", 1000, 2)
    last = run_undamaged(case, False)[1].received - 1
    outcomes = run(case, False, 1, Damage(last, (12_345,)))
    assert not any(one.error for one in outcomes)
    assert outcomes[1].result != outcomes[0].result


def test_results_are_those_without_checksums() -> None:
    def step(comm: Communicator) -> Any:
        x = np.arange(70_000, dtype=np.float32) % (3 + comm.rank)
        return mpicomp.Marsit().start(comm, x.size).aggregate(x), comm.allgather(x), comm.split(0) is not None

    plain, checked = (run_local(3, step, checksums=one) for one in (False, True))
    for mine, theirs in zip(plain, checked, strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1], theirs[1])


def test_a_residual_is_that_of_before_the_damaged_step() -> None:
    def step(outer: Communicator) -> bool:
        damager = Damager(None)
        comm = Communicator(cast(Any, DamagedComm(outer.mpi_comm, damager)), "ring", abort_hook=False, checksums=True)
        aggregator = mpicomp.DoubleSqueeze().start(comm, 5000)
        x = np.random.default_rng(comm.rank).standard_normal(5000, np.float32)
        aggregator.aggregate(x)
        before = aggregator.state_dict()
        if comm.rank == 1:
            damager.__init__(Damage(2, (99,)))  # type: ignore[misc]
            with pytest.raises(DamagedMessage):
                aggregator.aggregate(x)
            after = aggregator.state_dict()
            return all(np.array_equal(after[key], before[key]) for key in before)
        try:
            for _ in range(3):  # this rank may end the step
                aggregator.aggregate(x)
        except DamagedMessage:
            return True
        return False

    assert run_local(2, step) == [True, True]


def test_groups_have_the_option_of_their_communicator() -> None:
    def checks(comm: Communicator) -> tuple[bool, bool]:
        with comm.split(comm.rank // 2) as part:
            return comm.call_check.has_checksums, part.call_check.has_checksums

    assert run_local(4, checks) == [(False, False)] * 4
    assert run_local(4, checks, link="100mbit", checksums=True) == [(True, True)] * 4
    assert run_local(1, lambda comm: comm.call_check.has_checksums, checksums=True) == [False]


def life(victim: int, damage: Damage | None, folder: Path) -> list[tuple[str, Any, int]]:
    """Make, split and close a communicator; return error, result and number of messages of each rank."""

    def on_rank(outer: Communicator) -> tuple[str, Any, int]:
        damager = Damager(damage if outer.rank == victim else None)
        result, error = list[Any](), ""
        try:
            comm = Communicator(
                cast(Any, DamagedComm(outer.mpi_comm, damager)), "ring", 20, arrival_timeout=20, abort_hook=False,
                checksums=True, ranks_per_node=2, trace=folder,
            )  # fmt: skip
            part = comm.split(comm.rank % 2, -comm.rank)
            result += [part.allreduce(10**comm.rank), comm.nodes.sizes, comm.nodes.local.allreduce(comm.rank)]
            part.close()
            comm.barrier()
            comm.barrier()
            result.append(comm.rank)
            comm.close()
        except mpicomp.CollectiveError as failure:
            error = type(failure).__name__
        outer.mpi_comm.Ibarrier()
        return error, result, damager.received

    return mpicomp.run_local(3, on_rank)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", [0, 2])
def test_damage_while_communicators_are_made_and_split_and_closed_never_changes_a_result(
    victim: int, tmp_path: Path
) -> None:
    right = life(victim, None, tmp_path / "right")
    assert [(one[0], one[1][3]) for one in right] == [("", rank) for rank in range(3)]
    received, found = right[victim][2], 0
    for message in range(0, received, received // 15):
        outcomes = life(victim, Damage(message, (12_345 + message,)), tmp_path / str(message))
        errors = {one[0] for one in outcomes}
        # in close() the others may have ended, and a byte by which the ranks meet stays known
        assert errors <= {"", "DamagedMessage"}, (message, outcomes)
        for (_, result, _), (_, expected, _) in zip(outcomes, right, strict=True):
            assert result == expected[: len(result)], message
        found += errors == {"DamagedMessage"}
    assert found >= 8


def test_groups_of_other_ranks_than_their_colours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # as if MPI's own messages were damaged, which carry colours and keys
    split = LocalComm.Split
    monkeypatch.setattr(LocalComm, "Split", lambda self, color, key: split(self, color, 0))

    def divide(comm: Communicator) -> None:
        with pytest.raises(DamagedMessage, match="MPI has made a group of ranks 0-2 and not of ranks 2, 1, 0"):
            comm.split(0, -comm.rank)

    run_local(3, divide, checksums=True)


def test_descriptions_of_calls_that_differ_are_checked() -> None:
    def on_rank(outer: Communicator) -> str:
        damager = Damager(None)
        comm = Communicator(cast(Any, DamagedComm(outer.mpi_comm, damager)), abort_hook=False, checksums=True)
        damager.__init__(Damage(1, (99,)) if comm.rank == 0 else None)  # type: ignore[misc]
        with pytest.raises((CollectiveMismatch, DamagedMessage)) as caught:
            comm.allreduce(np.ones(3 + comm.rank))
        return type(caught.value).__name__

    assert run_local(2, on_rank) == ["DamagedMessage", "CollectiveMismatch"]


def test_ranks_with_different_checksums_are_refused() -> None:
    def make(comm: Communicator) -> str:
        with pytest.raises(ValueError, match="checksums is") as caught:
            Communicator(comm.mpi_comm, abort_hook=False, checksums=comm.rank == 0)
        return str(caught.value)

    assert run_local(2, make) == ["checksums is True on rank 0 and False on rank 1: pass the same on all ranks"] * 2


@pytest.mark.parametrize(("given", "topology", "text"), [("on", "ring", "True or False"), (True, "mpi", "mpi")])
def test_an_unusable_argument_is_refused(given: Any, topology: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        run_local(2, lambda comm: None, topology, checksums=given)
