"""Ranks that make different calls on two communicators, with calls in flight: all of them raise the same error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.progress.polling import MISMATCH_S
from tests.mpi.lanes import TIMEOUT_S, few_ranks

pytestmark = [few_ranks, pytest.mark.mpi(min_size=2)]
Program = Callable[[Communicator, Communicator], Any]
Operation = tuple[str, int, int]  # name, communicator, elements


def errors(mpi_comm: MPI.Intracomm, program: Program, leaves: bool = True) -> list[str]:
    """Return the name of the error that each rank's program raises; a rank that `leaves` goes to no more calls."""
    comms = [Communicator(mpi_comm, timeout=TIMEOUT_S) for _ in range(2)]
    error = ""
    try:
        if leaves:
            with comms[0], comms[1]:
                program(*comms)
        else:
            program(*comms)
    except Exception as caught:  # noqa: BLE001 - the ranks compare it
        error = type(caught).__name__
    return mpi_comm.allgather(error)


def ones(n: int = 1000) -> Any:
    return np.ones(n, np.float32)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_mismatch_of_a_handle_is_raised_where_its_rank_waits_on_another_communicator(
    leaves: bool, threads: bool, mpi_comm: MPI.Intracomm
) -> None:
    def program(first: Communicator, second: Communicator) -> None:
        if threads:
            assert first.start_progress_thread()
            assert second.start_progress_thread()
        if first.rank:
            first.barrier()
        handle = first.iallreduce(ones())
        second.barrier()
        handle.wait()

    assert set(errors(mpi_comm, program, leaves)) == {CollectiveMismatch.__name__}


def test_a_late_rank_is_waited_for_though_a_handle_has_met_a_mismatch(mpi_comm: MPI.Intracomm) -> None:
    def program(first: Communicator, second: Communicator) -> None:
        handle = first.iallreduce(ones(1000 + first.rank))
        if second.rank == 0:
            time.sleep(0.3 * MISMATCH_S)
        second.barrier()
        with pytest.raises(CollectiveMismatch):
            handle.wait()
        second.barrier()

    assert set(errors(mpi_comm, program, leaves=False)) == {""}


def test_a_new_call_raises_what_the_communicator_was_given_up_for(mpi_comm: MPI.Intracomm) -> None:
    def program(first: Communicator, second: Communicator) -> None:
        # a second call that is still in flight when the ranks find that they differ in the first one
        handles = [first.iallreduce(ones(1000 + first.rank)), first.iallreduce(ones(1_000_000))]
        second.barrier()
        deadline = time.monotonic() + TIMEOUT_S
        while first.calls.failure is None and time.monotonic() < deadline:
            second.calls.advance()
            handles[0]._call.advance_all()
        first.allreduce(ones())

    assert set(errors(mpi_comm, program, leaves=False)) == {CollectiveMismatch.__name__}


def differing(seed: int, ranks: int) -> list[list[Operation]]:
    """Return a random program for each rank: all equal, but for one call of the last rank."""
    draw = random.Random(seed)
    kinds = ("barrier", "allreduce", "iallreduce", "iallreduce")
    common = [(draw.choice(kinds), draw.randrange(2), draw.choice((4, 1000, 50000))) for _ in range(5)]
    odd, at = list(common), draw.randrange(4)
    kind, comm, _ = odd[at]
    odd[at] = draw.choice([(kind, comm, 77), ("barrier" if kind != "barrier" else "allreduce", comm, 4)])
    odd[at + 1 :] = draw.sample(odd[at + 1 :], 4 - at)
    return [common] * (ranks - 1) + [odd]


@pytest.mark.parametrize("seed", [one for one in range(12) if one != 6])  # in that one the ranks wait for each other
def test_random_programs_end_with_one_error(seed: int, mpi_comm: MPI.Intracomm) -> None:
    operations = differing(seed, mpi_comm.size)[mpi_comm.rank]

    def program(*comms: Communicator) -> None:
        handles = []
        for kind, comm, n in operations:
            if kind == "barrier":
                comms[comm].barrier()
            else:
                handles.append(getattr(comms[comm], kind)(ones(n)))
        for handle in handles:
            if not isinstance(handle, np.ndarray):
                handle.wait()

    assert len(set(errors(mpi_comm, program))) == 1
