"""Rows of the table of collectives: texts that ranks compare, packing, and arguments that do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicomp.torch.process_group import collective
from mpicomp.torch.process_group.collective import Collective, Operands, bind_operands
from mpicomp.torch.process_group.tensor_memory import PackedTensors, StagingTensors
from mpicomp.torch.process_group.transfers import BoundCollective

SIZE, ROOT = 3, 1


def bound(row: Collective, rank: int, *operands: Any, **options: Any) -> BoundCollective:
    comm: Any = SimpleNamespace(rank=rank, size=SIZE)
    return bind_operands(row, comm, Operands(*operands, **options), StagingTensors())


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def of_root(rank: int) -> list[Tensor]:
    return [ones(2)] * SIZE if rank == ROOT else []


def calls(rank: int) -> dict[str, BoundCollective]:
    """Return a call of each row, by the text that it should have."""
    total, both = {"op": ReduceOp.MAX}, [ones(2), ones(5)]
    return {
        "broadcast from rank 1 of 6 bool": bound(collective.BROADCAST, rank, [ones(2, 3, dtype=torch.bool)], root=ROOT),
        "all_reduce (MAX) of 4 float32": bound(collective.ALL_REDUCE, rank, [ones(4)], **total),
        "all_reduce (MAX) of 7 float32": bound(collective.ALL_REDUCE_SEVERAL, rank, both, **total),
        "reduce to rank 1 (MAX) of 4 float32": bound(collective.REDUCE, rank, [ones(4)], root=ROOT, **total),
        "all_reduce (SUM) of sparse float32[2, 2], 2 dimensions sparse": bound(
            collective.ALL_REDUCE_SPARSE, rank, [torch.eye(2).to_sparse()], op=ReduceOp.SUM
        ),
        "all_gather of [0, 4, 8] bytes of float32": bound(
            collective.ALL_GATHER, rank, [[ones(0), ones(1), ones(2)]], [ones(rank)]
        ),
        "all_gather of 3 times 28 bytes of float32": bound(collective.ALL_GATHER_SEVERAL, rank, [both] * SIZE, both),
        "all_gather of 3 times 9 bytes of uint8": bound(
            collective.ALL_GATHER_SINGLE,
            rank,
            [ones(6), ones(SIZE, dtype=torch.uint8)],
            [ones(2), ones(1, dtype=torch.uint8)],
        ),
        "reduce_scatter (MAX) of [0, 1, 2] float32": bound(
            collective.REDUCE_SCATTER, rank, [ones(rank)], [ones(0), ones(1), ones(2)], **total
        ),
        "reduce_scatter (MAX) of 3 times 7 float32": bound(
            collective.REDUCE_SCATTER_SINGLE, rank, both, [ones(6), ones(15)], **total
        ),
        "all_to_all of split sizes in float32": bound(collective.ALL_TO_ALL, rank, [ones(1)] * SIZE, [ones(2)] * SIZE),
        "all_to_all of 3 times 8 bytes of float32": bound(
            collective.ALL_TO_ALL_EVEN, rank, [ones(SIZE, 2)], [ones(SIZE, 2)]
        ),
        "gather with root 1 of 2 float32": bound(collective.GATHER, rank, of_root(rank), [ones(2)], root=ROOT),
        "scatter with root 1 of 2 float32": bound(collective.SCATTER, rank, [ones(2)], of_root(rank), root=ROOT),
        "barrier": bound(collective.BARRIER, rank),
    }


@pytest.mark.parametrize("rank", range(SIZE))
def test_each_row_describes_its_call_as_on_every_rank(rank: int) -> None:
    found = {text: call.text for text, call in calls(rank).items()}
    assert list(found.values()) == list(found)


def test_only_ranks_that_take_part_send_and_receive() -> None:
    for rank in range(SIZE):
        called = {call.text.split()[0]: call for call in calls(rank).values()}
        sends = {name for name, call in called.items() if call.sent}
        receives = {name for name, call in called.items() if call.received}
        at_root = rank == ROOT
        assert ("broadcast" in sends, "broadcast" in receives) == (at_root, not at_root)
        assert ("scatter" in sends, "scatter" in receives) == (at_root, True)
        assert ("gather" in sends, "gather" in receives) == (True, at_root)
        assert ("reduce" in sends, "reduce" in receives) == (True, at_root)


def test_contiguous_tensors_are_sent_from_their_own_memory_and_others_from_a_copy() -> None:
    plain, strided = torch.arange(6.0), torch.arange(6.0).view(2, 3).t()
    for tensor, is_copy in ((plain, False), (strided, True)):
        call = bound(collective.ALL_REDUCE, 0, [tensor], op=ReduceOp.SUM)
        assert call.sent is call.received is not None
        assert call.sent.is_copy is is_copy
        assert torch.equal(call.flat, tensor.reshape(-1))
        call.flat.add_(1)
        call.sent.copy_out()
        assert torch.equal(tensor.sum(), torch.tensor(21.0))


def test_an_input_that_will_be_overwritten_is_copied() -> None:
    output = torch.arange(6.0)
    call = bound(collective.ALL_GATHER_SINGLE, 0, [output], [output[2:4]])
    assert call.sent is not None
    assert call.sent.is_copy
    output.zero_()
    assert call.sent.flat.tolist() == [2, 3]


REFUSED = {
    "there is no rank 3 in this group of 3": (collective.BROADCAST, [ones(2)], (), 3),
    "there are 2 outputs for 3 ranks": (collective.ALL_GATHER, [ones(2)] * 2, [ones(2)]),
    "the input has 8 bytes, and the output of this rank, 4": (collective.ALL_GATHER, [ones(1)] * 3, [ones(2)]),
    "there are 2 outputs for 1 inputs": (collective.ALL_GATHER_SINGLE, [ones(3)] * 2, [ones(1)]),
    "the output must be 3 times as large": (collective.ALL_GATHER_SINGLE, [ones(4)], [ones(1)]),
    "the input must be 3 times as large": (collective.REDUCE_SCATTER_SINGLE, [ones(1)], [ones(4)]),
    "the root passes one for each rank": (collective.GATHER, [ones(1)], [ones(1)], 0),
    "the output has 4 bytes, and the input of rank 0, 8": (collective.SCATTER, [ones(1)], [ones(2)] * 3, 0),
    "make them equal, or pass split sizes": (collective.ALL_TO_ALL_EVEN, [ones(3)], [ones(6)]),
    "the first dimension, 4, cannot be cut in 3": (collective.ALL_TO_ALL_EVEN, [ones(4)], [ones(4)]),
    "MAX of sparse tensors is not supported": (
        collective.ALL_REDUCE_SPARSE,
        [torch.eye(2).to_sparse()],
        (),
        None,
        ReduceOp.MAX,
    ),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_arguments_that_do_not_fit_are_refused(problem: str) -> None:
    row, *operands = REFUSED[problem]
    with pytest.raises(ValueError, match=problem):
        bound(row, 0, *operands)


def test_tensors_of_one_call_have_one_dtype_unless_they_are_only_moved() -> None:
    mixed = [ones(2), ones(2, dtype=torch.int32)]
    with pytest.raises(TypeError, match=r"the tensors differ in dtype: torch.float32, torch.int32"):
        bound(collective.ALL_REDUCE_SEVERAL, 0, mixed, op=ReduceOp.SUM)
    with pytest.raises(TypeError, match="str is not a tensor"):
        bound(collective.ALL_REDUCE, 0, ["tensor"], op=ReduceOp.SUM)
    call = bound(collective.ALL_GATHER_SEVERAL, 0, [mixed] * SIZE, mixed)
    assert call.sent is not None
    assert (call.sent.flat.dtype, call.sent.nbytes) == (torch.uint8, 16)


def test_tensors_of_several_dtypes_and_strides_are_packed_and_unpacked() -> None:
    tensors = [ones(3, 2).t(), (torch.arange(7.0) + 5)[::7], torch.tensor([1, 2, 3, 4])[::2]]
    wanted = [tensor.clone() for tensor in tensors]
    packed = PackedTensors(tensors)
    packed.copy_in()
    for tensor in tensors:
        tensor.zero_()
    packed.copy_out()
    assert all(map(torch.equal, tensors, wanted))
