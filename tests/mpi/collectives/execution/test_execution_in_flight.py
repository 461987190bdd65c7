"""Collectives under way side by side: handles, long sequences, several communicators, and the user's own messages."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.schedules.registry import TOPOLOGIES
from tests.mpi.lanes import TIMEOUT_S, eight_too

pytestmark = pytest.mark.communicator(piece_bytes=1024)


def total(size: int, k: int) -> float:
    """Return the sum of the ranks' contributions to collective k, (r + 1) (k + 1) from rank r."""
    return (k + 1) * size * (size + 1) / 2


def start(comm: Communicator, k: int, n: int = 700) -> np.ndarray:
    return np.full(n, (comm.rank + 1.0) * (k + 1))


@pytest.mark.parametrize("comm", TOPOLOGIES, indirect=True)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), ()])
def test_handles_may_be_waited_for_in_any_order(comm: Communicator, order: tuple[int, ...]) -> None:
    handles = [comm.iallreduce(start(comm, k)) for k in range(4)]
    for k in order or np.roll(range(4), comm.rank):  # where none is given, each rank's is another
        assert (handles[k].wait() == total(comm.size, k)).all()
        assert handles[k].test()


def test_one_rank_may_wait_at_once_and_another_start_more_first(comm: Communicator) -> None:
    if comm.rank % 2:
        results = [comm.iallreduce(start(comm, k)).wait() for k in range(4)]
    else:
        results = [handle.wait() for handle in [comm.iallreduce(start(comm, k)) for k in range(4)]]
    for k, result in enumerate(results):
        assert (result == total(comm.size, k)).all()


def test_testing_alone_brings_a_handle_to_its_end(comm: Communicator) -> None:
    x = start(comm, 0)
    handle = comm.iallreduce(x, "mean", out=x)
    while not handle.test():
        pass
    assert handle.wait() is x
    assert (x == total(comm.size, 0) / comm.size).all()


def test_a_handle_holds_on_to_its_buffers(comm: Communicator) -> None:
    handles = [comm.iallreduce(start(comm, k)) for k in range(3)]
    litter = [np.full(700, np.nan) for _ in range(50)]  # takes the place of any freed memory
    assert [float(handle.wait().max()) for handle in handles] == [total(comm.size, k) for k in range(3)]
    assert len(litter) == 50


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_is_told_to_whoever_waits_at_once(mpi_comm: MPI.Intracomm) -> None:
    """A rank that waits for another call does not wait for ranks that have raised the mismatch and gone."""
    comm = Communicator(mpi_comm, "ring", TIMEOUT_S)
    bad = comm.iallreduce(np.ones(5 + (comm.rank == 1)))
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch, match=r"rank 1: iallreduce\(sum\) of float64\[6\]"):
        bad.wait() if comm.rank % 2 else comm.barrier()
    assert time.monotonic() - began < TIMEOUT_S / 2
    with pytest.raises(CollectiveMismatch, match=r"rank 1: iallreduce"):
        bad.wait()


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_that_the_caller_has_not_heard_of_is_raised_by_the_next_call(comm: Communicator) -> None:
    bad = comm.iallreduce(np.ones(5 + (comm.rank == 1)))
    if comm.rank == 0:
        while not bad._call.done:
            bad._call.advance()
    with pytest.raises(CollectiveMismatch, match=r"rank 1: iallreduce\(sum\) of float64\[6\]"):
        comm.barrier() if comm.rank == 0 else bad.wait()
    comm.barrier()
    with pytest.raises(CollectiveMismatch, match="rank 1: iallreduce"):
        bad.wait()


@eight_too
@pytest.mark.communicator(piece_bytes=512)
@pytest.mark.parametrize("comm", TOPOLOGIES, indirect=True)
def test_a_long_sequence_of_collectives_stays_in_step(comm: Communicator, jitter: Callable[[int], None]) -> None:
    jitter(100 + comm.rank)
    for k in range(30):
        assert (comm.allreduce(start(comm, k, 10 * k)) == total(comm.size, k)).all()
        if k % 7 == 0:
            root = k % comm.size
            assert comm.broadcast(np.array([comm.rank + k]), root)[0] == root + k


@pytest.mark.mpi(min_size=2)
def test_tags_stay_below_the_bound_and_come_round_again(comm: Communicator) -> None:
    bound = min(32_767, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
    tags = [comm.calls.next_tag() for _ in range(16_000 - 5)]
    assert 0 < min(tags) <= max(tags) <= bound
    for k in range(10):
        assert (comm.allreduce(start(comm, k)) == total(comm.size, k)).all()
    assert comm.calls.next_tag() in tags


def test_two_communicators_at_once_do_not_meet(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as one, Communicator(mpi_comm, "tree", TIMEOUT_S) as other:
        a, b = one.iallreduce(start(one, 0)), other.iallreduce(start(other, 1))
        c = one.iallreduce(start(one, 2))
        assert (other.allreduce(start(other, 3)) == total(one.size, 3)).all()
        for handle, k in ((c, 2), (b, 1), (a, 0)):
            assert (handle.wait() == total(one.size, k)).all()


def test_the_users_messages_on_the_parent_are_left_alone(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=256) as comm:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        tags = [comm.calls.next_tag() + step for step in range(-1, 3)] + [1, 2]
        boxes = [np.zeros(64) for _ in tags]
        receives = [mpi_comm.Irecv(box, left, tag) for box, tag in zip(boxes, tags, strict=True)]
        for k in range(3):
            assert (comm.allreduce(start(comm, k)) == total(comm.size, k)).all()
        sends = [mpi_comm.Isend(np.full(64, float(comm.rank)), right, tag) for tag in tags]
        assert (comm.allreduce(start(comm, 3)) == total(comm.size, 3)).all()
        MPI.Request.Waitall(receives + sends)
        assert all((box == left).all() for box in boxes)


def test_closing_gives_back_what_making_took(mpi_comm: MPI.Intracomm) -> None:
    for k in range(20):
        with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
            assert comm.allreduce(np.array([1.0]))[0] == comm.size, k
        assert comm.mpi_comm == MPI.COMM_NULL
