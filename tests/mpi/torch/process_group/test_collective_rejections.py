"""Arguments that cannot be used: an error here at once, and on the other ranks one that quotes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from collectives.errors import CollectiveMismatch

pytestmark = pytest.mark.usefixtures("group")

HALF = torch.ones(4, dtype=torch.float16)
REJECTED: dict[str, tuple[Callable[[], object], str]] = {
    "device": (lambda: dist.all_reduce(torch.ones(2, device="meta")), "the tensor is on meta, and this backend takes"),
    "layout": (lambda: dist.broadcast(torch.eye(2).to_sparse(), 0), "is torch.sparse_coo of torch.float32"),
    "bits of floats": (lambda: dist.all_reduce(HALF, dist.ReduceOp.BAND), "BAND of torch.float16 is not supported"),
    "order of numbers": (lambda: all_reduce_complex(), "MIN of torch.complex64 is not supported"),
    "mean of flags": (lambda: dist.all_reduce(HALF.bool(), dist.ReduceOp.AVG), "AVG of torch.bool is not supported"),
    "parts": (lambda: all_to_all(torch.ones(dist.get_world_size() + 1)), "cannot be cut in|are 1 elements"),
    "gathered": (
        lambda: all_gather(torch.ones(3), torch.ones(2)),
        "the input has 8 bytes, and the output of this rank",
    ),
    "no tensor": (lambda: dist.group.WORLD.allreduce([]), "the list of tensors is empty"),
    "two to reduce": (lambda: dist.group.WORLD.allreduce([HALF, HALF]), "the list has 2 tensors, and the call is of"),
    "two to send": (lambda: dist.group.WORLD.broadcast([HALF, HALF], root=0), "the list has 2 tensors"),
    "two to gather": (lambda: dist.group.WORLD.gather([], [HALF, HALF], root=0), "the list has 2 tensors"),
    "two lists": (lambda: dist.group.WORLD.allgather([[HALF], [HALF]], [HALF]), "there are 2 lists of tensors"),
    "splits": (lambda: splits(), r"split sizes \[.*\] do not cut a first dimension of 2"),
}


def all_reduce_complex() -> None:
    dist.group.WORLD.allreduce([HALF.to(torch.complex64)], op=dist.ReduceOp.MIN)


def all_to_all(tensor: torch.Tensor) -> None:
    if dist.get_world_size() == 1:
        raise ValueError("rank 0 of 1, all_to_all: there are 1 elements")
    dist.all_to_all_single(tensor.clone(), tensor)


def all_gather(output: torch.Tensor, tensor: torch.Tensor) -> None:
    dist.all_gather([output] * dist.get_world_size(), tensor)


def splits() -> None:
    size = dist.get_world_size()
    dist.all_to_all_single(torch.ones(2), torch.ones(2), [9] * size, [9] * size)


@pytest.mark.parametrize("case", REJECTED)
def test_what_every_rank_rejects_leaves_the_group_usable(case: str) -> None:
    call, message = REJECTED[case]
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=f"rank {dist.get_rank()} of .*({message})"):
            call()
    dist.barrier()


def test_what_one_rank_rejects_the_others_hear_of() -> None:
    last = dist.get_world_size() - 1
    tensor = torch.ones(3, device="meta" if dist.get_rank() == last else "cpu")
    error = ValueError if dist.get_rank() == last else CollectiveMismatch
    with pytest.raises(
        error, match="the tensor is on meta, and this backend takes tensors on the CPU and on GPUs: pass"
    ):
        dist.all_reduce(tensor)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_call_different_things_all_hear_who_called_what() -> None:
    tensor = torch.ones(3)
    with pytest.raises(CollectiveMismatch, match=r"rank 0: broadcast from rank 0 of 3 float32; ranks? 1.*: barrier\."):
        dist.barrier() if dist.get_rank() else dist.broadcast(tensor, 0)
    dist.barrier()
