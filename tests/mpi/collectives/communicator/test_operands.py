"""Arrays that cannot be used: an error on every rank before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator, CommunicatorClosed
from collectives.consistency.recursive_doubling import RecursiveDoubling
from tests.mpi.lanes import TIMEOUT_S, few_ranks

pytestmark = few_ranks

over_both = pytest.mark.parametrize("comm", ["ring", "auto"], indirect=True)


class Failing:
    """An array of a library that fails in its own way, in exporting itself or in making another."""

    def __init__(self, at: str) -> None:
        self.at, self.values = at, np.ones(4, np.float32)

    def __dlpack__(self, **options: Any) -> Any:
        if self.at == "dlpack":
            raise LookupError("no such buffer")
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def new_empty(self, shape: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def unaligned(n: int) -> Any:
    return np.zeros(4 * n + 1, np.uint8)[1:].view(np.float32)


@over_both
def test_unaligned_arrays_are_summed(comm: Communicator) -> None:
    x, out = unaligned(1003), unaligned(1003)
    x[:] = np.arange(1003)
    comm.allreduce(x, out=out)
    assert (out == comm.size * np.arange(1003)).all()
    assert comm.broadcast(out)[1002] == comm.size * 1002


def test_an_out_that_overlaps_the_array_is_refused(comm: Communicator) -> None:
    memory = np.ones(1001, np.float32)
    with pytest.raises(ValueError, match="out overlaps the array"):
        comm.allreduce(memory[:-1], out=memory[1:])
    assert (comm.allreduce(memory, out=memory) == comm.size).all()


@pytest.mark.mpi(min_size=2)
@over_both
@pytest.mark.parametrize("case", ["read-only", "sparse", "a list", "negated", "masked", "failing", "no room"])
def test_what_one_rank_cannot_pass_is_a_mismatch_on_the_others(comm: Communicator, case: str) -> None:
    culprit = comm.rank == comm.size - 1
    x = np.ones(4, np.float32)
    x.flags.writeable = not culprit
    matrix = torch.eye(4)
    call = {
        "read-only": lambda: comm.broadcast(x),
        "sparse": lambda: comm.allreduce(matrix.to_sparse() if culprit else matrix),
        "a list": lambda: comm.allreduce([1.0] * 4 if culprit else x),
        "negated": lambda: comm.allgather(torch._neg_view(matrix) if culprit else matrix),
        "masked": lambda: comm.iallreduce(x, out=np.ma.masked_array(x, [0, 1, 0, 1]) if culprit else x).wait(),
        "failing": lambda: comm.allreduce(Failing("dlpack") if culprit else x),
        "no room": lambda: comm.allreduce(Failing("room") if culprit else x),
    }[case]
    kinds = {"a list": TypeError, "masked": TypeError, "no room": MemoryError}
    with pytest.raises(
        kinds.get(case, ValueError) if culprit else CollectiveMismatch, match=f"rank {comm.size - 1} of"
    ):
        call()
    assert (comm.allreduce(np.ones(4)) == comm.size).all()


@pytest.mark.communicator(piece_bytes=2)
def test_pieces_shorter_than_an_element_hold_one(comm: Communicator) -> None:
    assert (comm.allreduce(np.ones(300)) == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_pieces_of_different_lengths_are_a_mismatch(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=4096 + 64 * mpi_comm.rank)
    with comm, pytest.raises(CollectiveMismatch, match="in pieces of 4096 bytes"):
        comm.allreduce(np.ones(300))


@pytest.mark.mpi(min_size=2)
@over_both
@pytest.mark.parametrize("call", ["allreduce", "iallreduce"])
def test_an_interrupted_check_closes_the_communicator(
    comm: Communicator, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RecursiveDoubling.start

    def interrupted(*args: Any) -> None:
        start(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RecursiveDoubling, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(comm, call)(np.ones(4))
    for again in (comm.allreduce, comm.iallreduce):
        with pytest.raises(CommunicatorClosed, match=f"rank {comm.rank} of {comm.size}: .* KeyboardInterrupt"):
            again(np.ones(4))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("topology", "where"), [("mpi", "allreduce.widen"), ("ring", "host_sum.widen"), ("auto", "allreduce.widen")]
)
def test_a_rank_that_fails_amid_a_sum_goes_no_further(
    mpi_comm: MPI.Intracomm, topology: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: Any) -> None:
        raise MemoryError("no room")

    comm = Communicator(mpi_comm, topology, TIMEOUT_S, verify=False)
    with monkeypatch.context() as patched:
        patched.setattr(f"collectives.dense.{where}", no_room)
        with pytest.raises(MemoryError):
            comm.allreduce(np.ones(100, np.float16))
    with pytest.raises(CommunicatorClosed, match="no room"):
        comm.allreduce(np.ones(100, np.float16))
