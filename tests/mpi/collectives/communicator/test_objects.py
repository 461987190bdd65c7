"""Pickled objects arrive whole, and an object that cannot travel is an error on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from collectives import CollectiveMismatch, Communicator
from collectives.dense import broadcast_gather
from tests.mpi.lanes import few_ranks

pytestmark = pytest.mark.communicator(topology="auto")


class Unreadable:
    """Can be pickled on every rank, and unpickled on some."""

    def __init__(self, ranks: set[int]) -> None:
        self.ranks = ranks

    def __reduce__(self) -> Any:
        return _read, (self.ranks,)


def _read(ranks: set[int]) -> str:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank in ranks:
        raise ImportError("no such module here")
    return "read"


@pytest.mark.parametrize("largest", [broadcast_gather.PART_BYTES, 100], ids=["one-round", "rounds"])
def test_the_roots_object_is_everywhere(comm: Communicator, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_gather, "PART_BYTES", largest)
    for root in range(comm.size):
        mine = {"rank": comm.rank, "array": np.full(300, comm.rank), "tensor": torch.full((3,), float(comm.rank))}
        found = comm.broadcast_object(mine if comm.rank == root else None, root)
        assert found["rank"] == root
        assert (found["array"] == root).all()
        assert (found["tensor"] == root).all()
        assert (found is mine) == (comm.rank == root)
    assert comm.broadcast_object(None) is None


@pytest.mark.parametrize("largest", [broadcast_gather.PART_BYTES, 100], ids=["one-round", "rounds"])
def test_every_ranks_object_is_everywhere(comm: Communicator, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_gather, "PART_BYTES", largest)
    mine = [comm.rank] * (1 + 100 * comm.rank)
    found = comm.allgather_object(mine)
    assert found == [[rank] * (1 + 100 * rank) for rank in range(comm.size)]
    assert found[comm.rank] is not mine


@few_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["broadcast_object", "allgather_object"])
def test_an_object_that_cannot_be_pickled_is_told_on_every_rank(comm: Communicator, call: str) -> None:
    culprit = comm.rank == 0
    with pytest.raises(
        TypeError if culprit else CollectiveMismatch,
        match=rf"rank 0 of {comm.size}, {call}\(.*a function cannot be pick",
    ):
        getattr(comm, call)((lambda: None) if culprit else 3)
    assert comm.broadcast_object("next") == "next"


@few_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["broadcast_object", "allgather_object"])
def test_an_object_that_one_rank_cannot_unpickle_is_told_on_every_rank(comm: Communicator, call: str) -> None:
    culprit = comm.rank == 1
    assert pickle.dumps(Unreadable({1}))
    with pytest.raises(
        TypeError if culprit else CollectiveMismatch,
        match=rf"rank 1 of {comm.size}, .*ImportError: no such module here",
    ):
        getattr(comm, call)(Unreadable({1}))
    assert comm.broadcast_object("next") == "next"


@few_ranks
def test_a_root_that_is_not_there_is_refused(comm: Communicator) -> None:
    for root in (comm.size, -1, None):
        with pytest.raises(ValueError, match=f"there is no rank {root} to broadcast from"):
            comm.broadcast_object(1, root)
    comm.barrier()
