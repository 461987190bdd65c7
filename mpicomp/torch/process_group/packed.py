"""Tensors as one stretch of memory, which is what MPI sends and receives."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


class Packed:
    """Tensors one after the other in memory: the tensors themselves where they lie so, and else a copy of them.

    Parameters
    ----------
    tensors : sequence of Tensor
        On the CPU, dense, of any shapes and layouts.
    filled : bool
        Whether a copy begins with the tensors' values.

    Attributes
    ----------
    flat : Tensor[n]
        Of the tensors' dtype; of bytes where dtypes differ.
    sizes : list of int
        Bytes of each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], filled: bool = True) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self.sizes = [tensor.numel() * tensor.element_size() for tensor in self._tensors]
        dtypes = {tensor.dtype for tensor in self._tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        span = None if dtypes else _span(self._tensors)
        self._copied = span is None
        self.flat = torch.empty(sum(self.sizes) // dtype.itemsize, dtype=dtype) if span is None else span
        if filled:
            self.fill()

    @property
    def bytes(self) -> Bytes:
        """The memory."""
        return as_bytes(self.flat)

    def fill(self) -> None:
        """Take the tensors' values over, if this is a copy."""
        if self._copied:
            for tensor, part in zip(self._tensors, self._parts(), strict=True):
                source = tensor if part.dtype == tensor.dtype else tensor.contiguous().view(-1).view(torch.uint8)
                part.copy_(source.reshape(-1))

    def apart_from(self, other: Packed) -> Packed:
        """Itself, or a copy if it shares memory with what is to be overwritten, which MPI forbids."""
        if np.may_share_memory(self.bytes, other.bytes):
            self._copied, self.flat = True, self.flat.clone()
        return self

    def unpack(self) -> None:
        """Bring what was received into the tensors."""
        if self._copied:
            with torch.inference_mode():  # tensors that were made in it can be written in it alone
                for tensor, part in zip(self._tensors, self._parts(), strict=True):
                    values = part if part.dtype == tensor.dtype else part.clone().view(tensor.dtype)
                    tensor.copy_(values.view(tensor.shape))

    def _parts(self) -> Sequence[Tensor]:
        itemsize = self.flat.element_size()
        return torch.split(self.flat, [size // itemsize for size in self.sizes])


def as_bytes(flat: Tensor) -> Bytes:
    """The memory of a contiguous vector."""
    return as_array(flat, np.uint8)


def as_array(flat: Tensor, dtype: Any) -> NDArray[Any]:
    """The memory of a contiguous vector, as elements of a type of NumPy's.

    `Tensor.numpy` would do, but forbids the tensor's owner to resize its storage afterwards, as FSDP does.
    """
    nbytes = flat.numel() * flat.element_size()
    if not nbytes:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(flat.data_ptr())
    memory.owner = flat  # whoever keeps the array keeps its memory
    return np.frombuffer(memory, dtype)


def _span(tensors: Sequence[Tensor]) -> Tensor | None:
    """The memory of tensors that follow each other without a gap, as a vector; None: they do not."""
    first, end, n = None, 0, 0
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.numel():
            if first is None:
                first, end = tensor, tensor.data_ptr()
            elif tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                return None
            end += tensor.numel() * tensor.element_size()
            n += tensor.numel()
    if first is None:
        return tensors[0].reshape(-1) if tensors else None
    return first.view(-1) if n == first.numel() else first.as_strided((n,), (1,))


def rows(tensor: Tensor, n: int) -> list[Tensor]:
    """A tensor in `n` equal parts, as views: along its memory where it is contiguous, else along its first dimension.

    Raises
    ------
    ValueError
        It cannot be cut so.
    """
    contiguous = tensor.is_contiguous()
    if (tensor.numel() if contiguous else tensor.shape[0]) % n:
        cure = "" if contiguous else " along the first dimension: pass a contiguous one"
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot be cut in {n} equal parts{cure}")
    return list((tensor.detach().view(-1) if contiguous else tensor.detach()).tensor_split(n))


def split_along_first(tensor: Tensor, splits: Sequence[int], n: int) -> list[int]:
    """Bytes of each rank's part of a tensor that is cut along its first dimension; no `splits`: in equal parts.

    Raises
    ------
    ValueError
        The splits do not fit the tensor.
    """
    length = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if length % n:
            raise ValueError(f"the first dimension, {length}, cannot be cut in {n} equal parts: pass split sizes")
        splits = [length // n] * n
    if len(splits) != n or sum(splits) != length or min(splits) < 0:
        raise ValueError(f"split sizes {list(splits)} do not cut a first dimension of {length} for {n} ranks")
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    return [split * row for split in splits]
