"""`allgather`: rows of all ranks in rank order, of any number, element type and library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.arrays.elements import COPIED
from collectives.dense import broadcast_gather
from tests.mpi.lanes import TIMEOUT_S, every_size

pytestmark = pytest.mark.communicator(topology="auto")

COUNTS: dict[str, Callable[[int], int]] = {
    "growing": lambda rank: 100 * rank,
    "one empty": lambda rank: 0 if rank == 0 else 7,
    "only one": lambda rank: 3000 if rank == 0 else 0,
    "all empty": lambda rank: 0,
    "equal": lambda rank: 11,
}


def rows(rank: int, count: int) -> torch.Tensor:
    """Rows that tell whose they are, in all element types."""
    return (torch.arange(count * 6) * (rank + 3) % 101).view(count, 2, 3)


@every_size
@pytest.mark.parametrize("largest", [broadcast_gather.PART_BYTES, 1000], ids=["one-round", "rounds"])
@pytest.mark.parametrize("kind", COUNTS)
def test_rows_come_in_rank_order_in_as_many_rounds_as_it_takes(
    comm: Communicator, kind: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast_gather, "PART_BYTES", largest)
    every = [rows(rank, COUNTS[kind](rank)).numpy() for rank in range(comm.size)]
    mine = every[comm.rank].copy()
    gathered = comm.allgather(mine)
    assert gathered.dtype == np.int64
    np.testing.assert_array_equal(gathered, np.concatenate(every))
    np.testing.assert_array_equal(mine, every[comm.rank])


@pytest.mark.parametrize("dtype", COPIED)
def test_kind_and_element_type_stay(comm: Communicator, dtype: str) -> None:
    kind = getattr(torch, dtype)
    every = torch.cat([rows(rank, rank + 1) for rank in range(comm.size)]).to(kind)
    tensor = comm.allgather(rows(comm.rank, comm.rank + 1).to(kind))
    assert tensor.dtype == kind
    assert torch.equal(tensor, every)
    if dtype != "bfloat16":
        array = comm.allgather(rows(comm.rank, comm.rank + 1).to(kind).numpy())
        assert isinstance(array, np.ndarray)
        assert array.dtype == dtype
        assert (array == every.numpy()).all()


def test_rows_without_elements_are_counted(comm: Communicator) -> None:
    assert comm.allgather(np.empty((comm.rank, 0, 3))).shape == (sum(range(comm.size)), 0, 3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (np.zeros((2, 4)), r"float64\[4\]"),
        (np.zeros((2, 3), np.float32), r"float32\[3\]"),
        (np.zeros(3), r"float64\[\]"),
    ],
)
def test_other_rows_are_a_mismatch_on_every_rank(comm: Communicator, odd: Any, told: str) -> None:
    culprit = comm.size - 1
    with pytest.raises(CollectiveMismatch, match=rf"rank {culprit}: allgather of rows of {told}"):
        comm.allgather(odd if comm.rank == culprit else np.zeros((comm.rank, 3)))
    comm.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("odd", "error", "told"),
    [
        (np.zeros(()), ValueError, r"has no rows; pass x\.reshape\(1\)"),
        (np.zeros((4, 3))[::2], ValueError, "not contiguous"),
        (np.zeros((2, 3), np.complex64), TypeError, "type complex64"),
        ([[1.0]], TypeError, "cannot gather list"),
    ],
)
def test_what_one_rank_cannot_gather_is_told_on_every_rank(
    comm: Communicator, odd: Any, error: type[Exception], told: str
) -> None:
    culprit = comm.rank == comm.size - 1
    with pytest.raises(error if culprit else CollectiveMismatch, match=f"rank {comm.size - 1} of .*{told}"):
        comm.allgather(odd if culprit else np.zeros((2, 3)))
    comm.barrier()


def test_it_waits_for_its_turn_behind_calls_in_flight(comm: Communicator) -> None:
    handle = comm.iallreduce(np.ones(50_000))
    gathered = comm.allgather(np.full((comm.rank, 2), comm.rank))
    assert gathered.shape[0] == sum(range(comm.size))
    assert (handle.wait() == comm.size).all()


def test_ranks_that_do_not_compare_gather_too(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S, verify=False) as comm:
        assert comm.allgather(np.full(comm.rank, comm.rank)).sum() == sum(rank**2 for rank in range(comm.size))
