"""Every operation of `ReduceOp` over each collective that reduces, and errors of unusable arguments on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from collectives.errors import CollectiveMismatch, CollectiveTimeout
from mpicomp.torch.process_group import transfers
from mpicomp.torch.process_group.tensor_memory import PackedTensors
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.process_group.inputs import TYPES, of_rank, reduced

pytestmark = [few_ranks, pytest.mark.usefixtures("group")]

SIZES = (0, 1, 37, 40_000)


def mine(n: int, dtype: torch.dtype) -> Tensor:
    return of_rank(dist.get_rank(), n, dtype)


@pytest.fixture(params=["gathered", "by parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short vectors go the way of long ones."""
    if request.param == "by parts":
        monkeypatch.setattr(transfers, "LARGEST_GATHERED_BYTES", -1)


@pytest.mark.parametrize("op", TYPES)
def test_all_reduce(op: str) -> None:
    for dtype in TYPES[op]:
        for n in SIZES:
            tensor = mine(n, dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            torch.testing.assert_close(tensor, reduced(op, n, dtype), msg=lambda text, dtype=dtype: f"{dtype}: {text}")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MAX", "AVG"])
def test_reduce_to_each_root(op: str) -> None:
    for root in range(dist.get_world_size()):
        tensor = mine(33, torch.bfloat16)
        dist.reduce(tensor, root, getattr(dist.ReduceOp, op))
        expected = reduced(op, 33, torch.bfloat16) if dist.get_rank() == root else mine(33, torch.bfloat16)
        torch.testing.assert_close(tensor, expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("op", ["MIN", "BXOR"])
def test_all_reduce_of_what_the_communicator_cannot_sum(op: str) -> None:
    tensor = mine(33, torch.int16)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    torch.testing.assert_close(tensor, reduced(op, 33, torch.int16))


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reduce_scatter_in_equal_and_in_uneven_parts(op: str, dtype: torch.dtype) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for counts in ([7] * size, list(range(size))):
        n, ends = sum(counts), torch.tensor(counts).cumsum(0)
        expected = reduced(op, n, dtype)[ends[rank] - counts[rank] : ends[rank]]
        output = torch.empty(counts[rank], dtype=dtype)
        dist.reduce_scatter(output, list(mine(n, dtype).split(counts)), getattr(dist.ReduceOp, op))
        torch.testing.assert_close(output, expected)
    output = torch.empty(7, dtype=dtype)
    dist.reduce_scatter_tensor(output, mine(7 * size, dtype), getattr(dist.ReduceOp, op))
    torch.testing.assert_close(output, reduced(op, 7 * size, dtype)[7 * rank : 7 * (rank + 1)])


def test_values_are_multiplied_by_each_ranks_factor_before_the_sum() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = sum(((other + 1) * of_rank(other, 50, torch.float32) for other in range(size)), torch.zeros(50))
    for factor in (float(rank + 1), torch.tensor([float(rank + 1)])):
        tensor = mine(50, torch.float32)
        dist.all_reduce(tensor, _make_nccl_premul_sum(factor))
        torch.testing.assert_close(tensor, expected)
    output = torch.empty(50)
    dist.reduce_scatter(output, [mine(50, torch.float32)] * size, _make_nccl_premul_sum(float(rank + 1)))
    torch.testing.assert_close(output, expected)


def test_sixteen_bit_sums_round_once() -> None:
    # with every addition rounded to bfloat16, whose numbers lie 2 apart here, nothing would ever be added to 256
    size = dist.get_world_size()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        parts = (
            torch.ones(40, dtype=torch.bfloat16) if dist.get_rank() else torch.full((40,), 256, dtype=torch.bfloat16)
        )
        output = torch.empty(40, dtype=torch.bfloat16)
        dist.reduce_scatter(output, [parts] * size, op)
        total = torch.tensor(256.0 + size - 1)
        expected = (total / size if op == dist.ReduceOp.AVG else total).to(torch.bfloat16)
        assert output.eq(expected).all()


def test_coalesced_tensors_are_reduced_as_one() -> None:
    tensors = [mine(n, torch.float32).view(-1, 1) for n in (3, 0, 11)]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
    for tensor in tensors:
        torch.testing.assert_close(tensor.view(-1), reduced("MAX", tensor.numel(), torch.float32))
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)  # the maximum of all ranks, from each
    for tensor in tensors:
        expected = reduced("MAX", tensor.numel(), torch.float32) * dist.get_world_size()
        torch.testing.assert_close(tensor.view(-1), expected)


def test_reduce_scatter_coalesced() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    inputs = [mine(size * n, torch.float32) for n in (2, 5)]
    outputs = [torch.empty(n) for n in (2, 5)]
    with dist._coalescing_manager():
        for output, one in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, one)
    for output in outputs:
        n = output.numel()
        torch.testing.assert_close(output, reduced("SUM", size * n, torch.float32)[rank * n : (rank + 1) * n])


def test_strided_tensors_are_reduced_in_place() -> None:
    whole = torch.zeros(6, 8)
    part = whole.t()[::2]
    part.copy_(mine(24, torch.float32).view(4, 6))
    dist.all_reduce(part)
    torch.testing.assert_close(part, reduced("SUM", 24, torch.float32).view(4, 6))
    assert whole.t()[1::2].eq(0).all()


def test_tensors_of_inference_mode_are_written_to() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4, 4).t()[::2]
        dist.all_reduce(tensor)
        assert tensor.eq(dist.get_world_size()).all()


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT])
def test_contiguous_tensors_of_inference_mode_are_reduced_in_place(op: dist.ReduceOp) -> None:
    """A metric of a validation is such a tensor."""
    with torch.inference_mode():
        tensor, count = torch.ones(5), torch.ones(5, dtype=torch.int64)
        dist.all_reduce(tensor, op)
        dist.all_reduce(count, op)
        expected = dist.get_world_size() if op == dist.ReduceOp.SUM else 1
        assert tensor.eq(expected).all()
        assert count.eq(expected).all()


def test_sparse_tensors_are_summed() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.sparse_coo_tensor([[rank, size, size]], [[1.0, 2.0], [3.0, 4.0], [0.5, 0.5]], (size + 1, 2))
    dist.all_reduce(tensor)
    expected = torch.tensor([[1.0, 2.0]] * size + [[3.5 * size, 4.5 * size]])
    torch.testing.assert_close(tensor.to_dense(), expected)


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
    "expanded": (
        lambda: dist.all_reduce(expanded()),
        r"elements of the tensor of shape \[4\] share memory.*contiguous",
    ),
    "overlapping": (lambda: dist.all_reduce(HALF.as_strided((3, 2), (1, 1))), r"shape \[3, 2\] share memory"),
    "one expanded output": (lambda: all_gather(expanded(), torch.ones(4)), "share memory"),
    "expanded parts": (
        lambda: dist.reduce_scatter_tensor(expanded(), torch.ones(4 * dist.get_world_size())),
        "share m",
    ),
    "two to exchange": (lambda: all_to_all_list(expanded()), "share memory"),
    "expanded among several": (lambda: dist.all_reduce_coalesced([torch.ones(4), expanded()]), "share memory"),
    "expanded to receive": (lambda: dist.irecv(expanded(), 0), "share memory"),
    "nested": (
        lambda: dist.all_reduce(torch.nested.nested_tensor([HALF, HALF])),
        "the tensor is nested: pass its parts",
    ),
    "quantized": (
        lambda: dist.all_reduce(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        "is quantized",
    ),
    "freed": (lambda: dist.all_reduce(freed()), "the memory of the tensor of shape .* was freed: pass"),
    "freed to send": (lambda: dist.isend(freed(), 0), "the memory of the tensor of shape .* was freed"),
    "distributed": (lambda: dist.all_reduce(distributed()), r"of type DTensor, .*: pass tensor.to_local\(\)"),
    "not awaited": (lambda: reduce_unawaited(), r"of type AsyncCollectiveTensor, .*: pass tensor.wait\(\)"),
    "fake": (
        lambda: dist.all_reduce(FakeTensorMode().from_tensor(HALF)),
        "of type FakeTensor, .*: pass a plain tensor",
    ),
    "splits": (lambda: splits(), r"split sizes \[.*\] do not cut a first dimension of 2"),
}


def expanded() -> Tensor:
    return torch.ones(1).expand(4)


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def distributed() -> Tensor:
    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),)))


def reduce_unawaited() -> None:
    tensor: Any = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    try:
        dist.all_reduce(tensor)
    finally:
        tensor.wait()


def all_to_all_list(output: Tensor) -> None:
    size = dist.get_world_size()
    dist.all_to_all([output] * size, [torch.ones(4)] * size)


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


@pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|quantized tensor creation)")
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


def test_expanded_tensors_are_sent_and_gathered() -> None:
    size = dist.get_world_size()
    outputs = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(outputs, expanded())
    assert torch.cat(outputs).eq(1).all()
    tensor = expanded() if dist.get_rank() == 0 else torch.zeros(4)
    dist.broadcast(tensor, 0)
    assert tensor.eq(1).all()


def test_sparse_tensors_of_inference_mode_are_summed() -> None:
    with torch.inference_mode():
        tensor = torch.eye(2).to_sparse()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), dist.get_world_size() * torch.eye(2))


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_alone_is_named_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: PackedTensors) -> None:
        raise RuntimeError("no memory is left")

    if dist.get_rank() == 1:
        monkeypatch.setattr(PackedTensors, "copy_out", fail)
        with pytest.raises(RuntimeError, match="no memory is left"):
            dist.all_reduce(torch.ones(4))
    else:
        with pytest.raises(CollectiveTimeout, match=r"has given up: RuntimeError of rank 1: no memory is left"):
            _ = [dist.all_reduce(torch.ones(4)) for _ in range(2)]  # the first one may succeed


@pytest.mark.mpi(min_size=2)
def test_ranks_that_call_different_things_all_hear_who_called_what() -> None:
    tensor = torch.ones(3)
    with pytest.raises(CollectiveMismatch, match=r"rank 0: broadcast from rank 0 of 3 float32; ranks? 1.*: barrier\."):
        dist.barrier() if dist.get_rank() else dist.broadcast(tensor, 0)
    dist.barrier()
