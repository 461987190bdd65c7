"""What a collective is, before it is a call; and checks of its arguments, which communicate nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from collectives import Communicator
from collectives.execution.handle import Steps
from mpicomp.torch.process_group.packed import Packed


class Operation(NamedTuple):
    """One collective of one rank.

    Attributes
    ----------
    text : str
        What all ranks must agree on.
    steps : callable
        Carries it out, given the communicator and the call.
    result : sequence of Tensor
        What its future holds.
    received : sequence of Packed
        To be unpacked at the end.
    agrees : bool
        `steps` takes the call's fingerprint too, and has the ranks compare it.
    """

    text: str
    steps: Callable[..., Steps]
    result: Sequence[Tensor] = ()
    received: Sequence[Packed] = ()
    agrees: bool = False


def require_dense(tensors: Sequence[Tensor], one_dtype: bool = True) -> None:
    """Raise TypeError or ValueError unless all are tensors in the host's memory, or their twins, as messages carry."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{type(tensor).__name__} is not a tensor")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"the tensor is {tensor.layout} of {tensor.dtype}: pass a dense one")
        if tensor.device.type != "cpu":
            raise ValueError(
                f"the tensor is on {tensor.device}, and this backend takes tensors on the CPU and on GPUs: pass "
                "tensor.cpu()"
            )
    dtypes = {tensor.dtype for tensor in tensors}
    if one_dtype and len(dtypes) > 1:
        raise TypeError(f"the tensors differ in dtype: {', '.join(sorted(map(str, dtypes)))}")


def named_dtype(dtype: torch.dtype) -> str:
    """A dtype in words."""
    return str(dtype).removeprefix("torch.")


def require(fits: bool, problem: str) -> None:
    """Raise ValueError with the problem unless the arguments fit."""
    if not fits:
        raise ValueError(problem)


def require_root(comm: Communicator, root: int) -> None:
    """Raise ValueError unless there is such a rank."""
    require(0 <= root < comm.size, f"there is no rank {root} in this group of {comm.size}")


def require_pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless each input has an output."""
    require(len(outputs) == len(inputs), f"there are {len(outputs)} outputs for {len(inputs)} inputs")


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def counted(sizes: Sequence[int]) -> str:
    """Sizes in words, short where they are alike."""
    return f"{len(sizes)} times {sizes[0]}" if len(set(sizes)) == 1 else str(list(sizes))
