"""Broadcast and barrier, in parts that MPI can count and with deadlines."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import CollectiveTimeout, Communicator, CommunicatorClosed
from collectives.dense import broadcast_gather
from tests.mpi.lanes import TIMEOUT_S, few_ranks, impatient

pytestmark = pytest.mark.communicator(topology="auto")


def payload(source: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that tell whose they are."""
    return np.random.default_rng([source, nbytes]).integers(0, 256, nbytes, np.uint8)


def test_broadcast_overwrites_with_the_roots(comm: Communicator) -> None:
    for root in range(comm.size):
        for dtype in (np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_):
            x = (np.arange(1001).reshape(7, 143) * (comm.rank + 3) % 5).astype(dtype)
            assert comm.broadcast(x, root) is x
            assert (x == (np.arange(1001).reshape(7, 143) * (root + 3) % 5).astype(dtype)).all()
        for kind in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            tensor = (torch.arange(10) % (comm.rank + 2)).to(kind)
            comm.broadcast(tensor, root)
            assert torch.equal(tensor, (torch.arange(10) % (root + 2)).to(kind))
    assert comm.broadcast(np.empty((3, 0))).shape == (3, 0)


def test_broadcast_is_sent_in_parts_that_mpi_can_count(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_gather, "PART_BYTES", 100)
    x = payload(comm.rank, 1234)
    comm.broadcast(x)
    assert (x == payload(0, 1234)).all()


def test_a_root_that_is_not_there_is_refused_everywhere(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=str(comm.size)):
        comm.broadcast(np.ones(3), root=comm.size)
    assert comm.allreduce(np.ones(1))[0] == comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("verify", [False, True])
def test_nobody_leaves_a_barrier_before_the_last_has_come(mpi_comm: MPI.Intracomm, verify: bool) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S, verify=verify) as comm:
        arrived = time.monotonic()
        if comm.rank == comm.size - 1:
            time.sleep(0.2)
            arrived = time.monotonic()
        comm.barrier()
        left = time.monotonic()
    assert left >= max(mpi_comm.allgather(arrived))


@few_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["barrier", "iallreduce", "broadcast", "allgather", "number", "object", "split"])
def test_every_wait_has_a_deadline(mpi_comm: MPI.Intracomm, call: str) -> None:
    verify = call not in ("barrier", "allgather", "split")
    comm = impatient(mpi_comm, 0.3, verify=verify)
    calls: dict[str, Any] = {
        "barrier": comm.barrier,
        "iallreduce": lambda: comm.iallreduce(np.ones(5)).wait(),
        "broadcast": lambda: comm.broadcast(np.zeros(3)),
        "allgather": lambda: comm.allgather(np.zeros(3)),
        "number": lambda: comm.allreduce(1.0),
        "object": lambda: comm.broadcast_object("mine"),
        "split": lambda: comm.split(0),
    }
    if comm.rank:
        with pytest.raises(CollectiveTimeout, match=rf"rank {comm.rank} of {comm.size}.* after [\d.]+ s"):
            calls[call]()
    mpi_comm.barrier()


def test_a_closed_communicator_says_so(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm)
    comm.close()
    comm.close()
    with pytest.raises(CommunicatorClosed, match="was closed; make a new one"):
        comm.allreduce(np.ones(3))


@pytest.mark.mpi(min_size=2)
def test_after_a_timeout_the_communicator_refuses_and_a_new_one_works(mpi_comm: MPI.Intracomm) -> None:
    comm = impatient(mpi_comm, 0.3)
    if comm.rank:
        with pytest.raises(CollectiveTimeout):
            comm.allreduce(np.ones(3))
        with pytest.raises(CommunicatorClosed, match="earlier call failed"):
            comm.allreduce(np.ones(3))
    mpi_comm.barrier()
    with Communicator(mpi_comm) as another:
        assert another.allreduce(np.ones(1))[0] == another.size
