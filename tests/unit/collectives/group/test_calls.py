"""Calls that are made before the ranks regroup and begin afterwards, and calls that an interrupt leaves undriven."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator
from collectives.execution.call import Call, Steps
from collectives.process_end import _open
from collectives.recovery.regroup import Regroup
from collectives.recovery.survivors import renew_all
from collectives.trace.flight_recorder import RecordedGroup
from mpicomp import Marsit, run_local

N = 1000


def expect_deaths(comm: Communicator) -> None:
    """Let the ranks of a communicator regroup, which ranks in threads cannot do by themselves."""
    comm.recovery = comm.calls.recovery = Regroup(comm, lambda: None, lambda: None, range(comm.size))
    comm.repeats_calls = True


def regroup(comm: Communicator) -> None:
    """Go on with all ranks in a new group, as after a death; collective."""
    assert isinstance(comm.recovery, Regroup)
    saved, ranks = comm.recovery.survivors.save(), tuple(range(comm.size))
    comm.renew(comm.mpi_comm.Dup(), ranks, (comm.layout, comm.hosts))
    renew_all(saved, [one.name for one in saved], len(saved), ranks)
    comm.recovery.count += 1


def regroup_before_next_begins(comm: Communicator) -> None:
    """Regroup between the making of the next call and its beginning."""
    begin = comm.calls.open

    def begin_later(call: Call, steps: Steps) -> None:
        comm.calls.open = begin  # type: ignore[method-assign]
        regroup(comm)
        begin(call, steps)

    comm.calls.open = begin_later  # type: ignore[method-assign]


def vector(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(N).astype(np.float32)


def make_signs(comm: Communicator) -> Callable[[], Any]:
    aggregator = Marsit(full_precision_every=None).start(comm, N)
    aggregator.aggregate(vector(comm.rank))
    return lambda: aggregator.aggregate(vector(comm.rank + 10)).tolist()


CALLS: dict[str, Callable[[Communicator], Callable[[], Any]]] = {
    "signs": make_signs,
    "sum": lambda comm: lambda: comm.allreduce(np.full(N, comm.rank)).tolist(),
    "number": lambda comm: lambda: comm.allreduce(comm.rank, "max"),
    "rows": lambda comm: lambda: comm.allgather(np.array([comm.rank])).tolist(),
    "array": lambda comm: lambda: comm.broadcast(np.array([comm.rank]), root=1).tolist(),
    "object": lambda comm: lambda: comm.broadcast_object(comm.rank, root=1),
    "objects": lambda comm: lambda: comm.allgather_object(comm.rank),
    "barrier": lambda comm: comm.barrier,
    "split": lambda comm: lambda: comm.split(0).size,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_made_before_the_ranks_regroup_is_that_of_the_new_group(name: str) -> None:
    def work(comm: Communicator, early: tuple[int, ...]) -> Any:
        expect_deaths(comm)
        call = CALLS[name](comm)
        if comm.rank in early:
            regroup_before_next_begins(comm)
        else:
            regroup(comm)
        return call()

    expected, mixed, early = (
        run_local(2, partial(work, early=ranks), timeout=5.0, arrival_timeout=5.0) for ranks in ((), (0,), (0, 1))
    )
    for found in (*mixed, *early, expected[1]):
        assert np.array_equal(found, expected[0])


def test_the_name_of_a_group_counts_the_regroupings_that_all_ranks_have_ended() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        expect_deaths(comm)
        first, ranks, layouts = comm.key, (0,), (comm.layout, comm.hosts)
        names = []
        for has_ended in (False, False, True, True):  # a rank dies before all have ended the first one
            comm.renew(comm.mpi_comm.Dup(), ranks, layouts)
            assert comm.recovery is not None
            assert isinstance(comm.calls.history, RecordedGroup)
            names.append(comm.calls.history.key)
            comm.recovery.count += has_ended
        assert names == [f"{first}+1", f"{first}+1", f"{first}+1", f"{first}+2"]


def test_only_the_group_of_the_survivors_is_left_at_the_end_of_the_program() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        expect_deaths(comm)
        old = comm.ending, comm.nodes.local.ending, comm.nodes.across.ending
        assert set(old) <= set(_open)
        comm.renew(comm.mpi_comm.Dup(), (0,), (comm.layout, comm.hosts))
        assert not set(old) & set(_open)
        assert comm.ending in _open


@pytest.mark.parametrize("was_busy", [False, True])
def test_an_interrupt_just_before_a_call_is_driven_ends_it(
    was_busy: bool, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(call: Call) -> None:
        call.busy = was_busy
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Call, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
    assert not comm.calls.ordered
    with pytest.raises(CollectiveError, match="KeyboardInterrupt"):
        comm.barrier()
