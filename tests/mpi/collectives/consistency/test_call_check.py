"""Ranks that do not make the same call: one text for all of them, and the communicator stays usable."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator, TopologyError, Torus
from tests.mpi.lanes import TIMEOUT_S, same_text_on

pytestmark = pytest.mark.mpi(min_size=2)

Call = Callable[[Communicator], Any]
over_both = pytest.mark.parametrize("comm", ["ring", "auto"], indirect=True)


def assert_usable(comm: Communicator) -> None:
    assert (comm.allreduce(np.ones(100, np.float32)) == comm.size).all()
    assert comm.broadcast(np.array([comm.rank + 3]), root=1)[0] == 4
    comm.barrier()


def usual(comm: Communicator) -> Any:
    return comm.allreduce(np.ones((2, 3), np.float32))


def others(size: int) -> str:
    """All ranks but the last, as messages name them."""
    return {2: "rank 0", 3: "ranks 0-1"}.get(size, f"ranks 0-{size - 2}")


# The last rank's call while the others sum float32[2, 3], and its description in the error.
DIFFERENT: dict[str, tuple[Call, str]] = {
    "shape": (lambda c: c.allreduce(np.ones((3, 2), np.float32)), "allreduce(sum) of float32[3, 2]"),
    "length": (lambda c: c.allreduce(np.ones(7, np.float32)), "allreduce(sum) of float32[7]"),
    "dtype": (lambda c: c.allreduce(np.ones((2, 3))), "allreduce(sum) of float64[2, 3]"),
    "op": (lambda c: c.allreduce(np.ones((2, 3), np.float32), "mean"), "allreduce(mean) of float32[2, 3]"),
    "broadcast": (lambda c: c.broadcast(np.ones((2, 3), np.float32)), "broadcast(root=0) of float32[2, 3]"),
    "barrier": (lambda c: c.barrier(), "barrier()"),
    "handle": (lambda c: c.iallreduce(np.ones((2, 3), np.float32)).wait(), "iallreduce(sum) of float32[2, 3]"),
}


@over_both
@pytest.mark.parametrize("what", DIFFERENT)
def test_every_rank_is_told_who_calls_what(comm: Communicator, what: str) -> None:
    odd = comm.size - 1
    call, told = DIFFERENT[what]
    with pytest.raises(CollectiveMismatch) as caught:
        (call if comm.rank == odd else usual)(comm)
    text = same_text_on(comm, caught.value, range(comm.size))
    assert f"{others(comm.size)}: allreduce(sum) of float32[2, 3]" in text
    assert f"rank {odd}: {told}" in text
    assert "Make the same calls in the same order" in text
    assert_usable(comm)


def test_broadcasts_from_two_roots_are_a_mismatch(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch, match=r"rank 0: broadcast\(root=0\) .*rank.*broadcast\(root=1\)"):
        comm.broadcast(np.ones(3), root=min(comm.rank, 1))
    assert_usable(comm)


# The last rank's argument, and its description in the error.
UNFIT: dict[str, tuple[Call, type[Exception], str]] = {
    "non-contiguous": (lambda c: c.allreduce(np.ones((3, 2)).T), ValueError, "not contiguous.*pass a contiguous copy"),
    "requires grad": (lambda c: c.allreduce(torch.ones(3, requires_grad=True)), TypeError, r"pass tensor\.detach\(\)"),
    "small integers": (lambda c: c.allreduce(np.ones(3, np.int8)), TypeError, "type int8: convert to one of float16"),
    "mean of integers": (lambda c: c.allreduce(np.ones(3, np.int64), "mean"), TypeError, "type int64: convert to"),
    "a list": (lambda c: c.allreduce([1.0, 2.0]), TypeError, "cannot reduce list"),
    "an unknown op": (lambda c: c.allreduce(np.ones(3), "median"), ValueError, "op is 'median'; choose one of 'sum'"),
    "out of another shape": (lambda c: c.allreduce(np.ones(3), out=np.ones(4)), ValueError, "out has shape"),
    "out of another dtype": (lambda c: c.allreduce(np.ones(3), out=np.ones(3, "f4")), TypeError, "float32: convert"),
    "text": (lambda c: c.broadcast(np.array(["a"])), TypeError, "convert to one of"),
}


@over_both
@pytest.mark.parametrize("what", UNFIT)
def test_what_one_rank_cannot_reduce_all_hear_of(comm: Communicator, what: str) -> None:
    odd = comm.size - 1
    call, kind, told = UNFIT[what]
    with pytest.raises(kind if comm.rank == odd else CollectiveMismatch) as caught:
        (call if comm.rank == odd else usual)(comm)
    text = same_text_on(comm, caught.value, range(odd))
    assert comm.rank < odd or re.search(f"rank {odd} of {comm.size}.*{told}", str(caught.value))
    assert comm.rank < odd or caught.value.__suppress_context__
    assert f"{others(comm.size)}: allreduce(sum) of float32[2, 3]" in text
    assert re.search(f"rank {odd} rejects .*{told}", text)
    assert_usable(comm)


def test_what_all_ranks_cannot_reduce_each_says_itself(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=f"rank {comm.rank} of {comm.size}.*int8"):
        comm.allreduce(np.ones(3, np.int8))
    assert_usable(comm)


def test_other_topologies_are_a_mismatch(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm, "ring" if mpi_comm.rank else "tree", TIMEOUT_S)
    with comm, pytest.raises(CollectiveMismatch, match=r"rank 0: .* by Tree\(.*rank.* by Ring\("):
        usual(comm)


def test_a_torus_that_does_not_fit_names_those_that_do(mpi_comm: MPI.Intracomm) -> None:
    size = mpi_comm.size
    with pytest.raises(
        TopologyError, match=rf"{size} ranks do not fill a torus of 3 x 3 .* fit: 1 x {size}, .*{size} x 1"
    ):
        Communicator(mpi_comm, Torus(3, 3))
    assert mpi_comm.allreduce(1) == size
