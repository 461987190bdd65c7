"""Collectives that move tensors from rank to rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.errors import CollectiveMismatch
from mpicomp.torch.process_group import transfers
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.process_group.inputs import of_rank

TYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64)


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return of_rank(rank, n, dtype)


def mine(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return values(dist.get_rank(), n, dtype)


@pytest.fixture(params=["by a collective of MPI", "by messages in pieces"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short vectors go the way of those that MPI cannot count."""
    if request.param == "by messages in pieces":
        monkeypatch.setattr(transfers, "LARGEST_COUNT", -1)
        monkeypatch.setattr(transfers, "LARGEST_MESSAGE_BYTES", 48)


pytestmark = [few_ranks, pytest.mark.usefixtures("group", "way")]


@pytest.mark.parametrize("dtype", TYPES)
def test_broadcast_from_each_root(dtype: torch.dtype) -> None:
    for root in range(dist.get_world_size()):
        tensor = mine(30, dtype).view(5, 6).t()
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, values(root, 30, dtype).view(5, 6).t())


@pytest.mark.parametrize("dtype", TYPES)
def test_all_gather_in_lists_and_into_a_tensor(dtype: torch.dtype) -> None:
    size = dist.get_world_size()
    expected = [values(rank, 30, dtype) for rank in range(size)]
    outputs = [torch.empty(30, dtype=dtype) for _ in range(size)]
    dist.all_gather(outputs, mine(30, dtype))
    assert all(map(torch.equal, outputs, expected))
    for shape in ((size * 30,), (size, 30)):
        output = torch.empty(shape, dtype=dtype)
        dist.all_gather_into_tensor(output, mine(30, dtype))
        assert torch.equal(output.view(-1), torch.cat(expected))


def test_all_gather_into_a_strided_tensor() -> None:
    size = dist.get_world_size()
    output = torch.zeros(3, 2 * size).t()
    dist.all_gather_into_tensor(output, mine(6).view(2, 3))
    assert torch.equal(output, torch.cat([values(rank, 6).view(2, 3) for rank in range(size)]))


def test_all_gather_of_sizes_that_differ() -> None:
    outputs = [torch.empty(rank, 3) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    dist.all_gather(outputs, mine(3 * rank).view(rank, 3))
    for other, output in enumerate(outputs):
        assert torch.equal(output.view(-1), values(other, 3 * other))


def test_all_gather_into_the_tensor_that_holds_the_input() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for place in (rank, (rank + 1) % size):  # where it belongs, and where another rank's is to come
        output = torch.zeros(size * 20)
        part = output[20 * place : 20 * (place + 1)]
        part.copy_(mine(20))
        dist.all_gather_into_tensor(output, part)
        assert torch.equal(output, torch.cat([values(other, 20) for other in range(size)]))


def test_all_gather_coalesced_of_several_dtypes() -> None:
    size = dist.get_world_size()
    inputs = [mine(3, torch.float64), mine(5, torch.uint8), mine(4, torch.bfloat16)]
    outputs = [torch.empty(size * one.numel(), dtype=one.dtype) for one in inputs]
    with dist._coalescing_manager():
        for output, one in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, one)
    for output, one in zip(outputs, inputs, strict=True):
        assert torch.equal(output, torch.cat([values(rank, one.numel(), one.dtype) for rank in range(size)]))


def test_memory_of_a_tensor_can_be_resized_afterwards() -> None:
    sent, output = mine(8), torch.empty(8 * dist.get_world_size())
    dist.all_gather_into_tensor(output, sent)
    dist.all_reduce(output)
    for tensor in (sent, output):
        tensor.untyped_storage().resize_(0)


def test_gather_and_scatter_with_each_root() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for root in range(size):
        outputs = [torch.empty(9) for _ in range(size)] if rank == root else None
        dist.gather(mine(9), outputs, root)
        assert outputs is None or all(torch.equal(one, values(other, 9)) for other, one in enumerate(outputs))
        output = torch.empty(9)
        dist.scatter(output, [values(other, 9) for other in range(size)] if rank == root else None, root)
        assert torch.equal(output, mine(9))


def test_all_to_all_in_equal_parts() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(size, 5)
    dist.all_to_all_single(output, mine(size * 5).view(size, 5))
    for other in range(size):
        assert torch.equal(output[other], values(other, size * 5)[5 * rank : 5 * (rank + 1)])


def test_all_to_all_in_uneven_parts() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = [(rank + other) % 3 for other in range(size)]  # the same seen from the other rank
    output, sent = (
        torch.empty(sum(rows), 2),
        [mine(2 * count).view(count, 2) + other for other, count in enumerate(rows)],
    )
    dist.all_to_all_single(output, torch.cat(sent), rows, rows)
    outputs = [torch.empty(count, 2) for count in rows]
    dist.all_to_all(outputs, sent)
    for other, (count, part) in enumerate(zip(rows, output.split(rows), strict=True)):
        assert torch.equal(part, values(other, 2 * count).view(count, 2) + rank)
        assert torch.equal(outputs[other], part)


def test_split_sizes_that_do_not_match_raise_on_every_rank() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    awaited = [2 if rank == 0 else 1] + [1] * (size - 1)
    with pytest.raises(CollectiveMismatch, match=r"rank 0 awaits 8 bytes of rank 0, which sends 4;"):
        dist.all_to_all_single(torch.empty(sum(awaited)), torch.zeros(size), awaited, [1] * size)
    dist.barrier()


def test_objects() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "long": "x" * rank})
    assert objects == [{"rank": other, "long": "x" * other} for other in range(size)]
    shared = [("root", size)] if rank == size - 1 else [None]
    dist.broadcast_object_list(shared, size - 1)
    assert shared == [("root", size)]
    got: list[object] = [None]
    dist.scatter_object_list(got, [[other] for other in range(size)] if rank == 0 else None)
    assert got == [[rank]]
