"""Tensors as MPI takes them: one block of host memory, which is pinned for tensors on a device."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import DTypeLike
from torch import Tensor

from collectives.annotations import AnyArray, Bytes, Testable
from collectives.arrays import Device, named
from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.execution.call import Call, Steps
from collectives.execution.staged import await_operation, run_before_arrival, use_in_background

Operand = Tensor | Sequence["Operand"]
"""Tensor, or nested lists of tensors."""


class Segment:
    """Contiguous memory of the host that a rank sends or receives.

    `sizes` are the bytes for or from each rank, in order. None: each peer sends or receives all of it.
    """

    def __init__(self, flat: Tensor, sizes: Sequence[int] | None = None) -> None:
        self.flat, self.sizes = flat, sizes

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.flat.nbytes

    def mpi_buffer(self) -> list[object]:
        """Return the segment as mpi4py takes it."""
        return [as_bytes(self.flat), self.nbytes if self.sizes is None else self.sizes, MPI.BYTE]

    def parts(self, ranks: int, root: int | None) -> Iterator[tuple[int, Bytes]]:
        """Yield each peer with the memory for or from it. Without sizes, a root is the only peer."""
        memory = as_bytes(self.flat)
        if self.sizes is None:
            yield from ((peer, memory) for peer in (range(ranks) if root is None else (root,)))
            return
        for peer, (size, end) in enumerate(zip(self.sizes, accumulate(self.sizes), strict=True)):
            yield peer, memory[end - size : end]


class PackedTensors(Segment):
    """Tensors as one segment: their own memory if it has no gaps, else a copy, which has no values until `copy_in`.

    They are dense, of any shapes and strides. The segment is of bytes if their dtypes differ.
    """

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int] | None = None) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        dtypes = {tensor.dtype for tensor in self._tensors}
        span = _span(self._tensors) if len(dtypes) == 1 else None
        self.is_copy = span is None
        if span is None:
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
            n = sum(tensor.nbytes for tensor in self._tensors) // dtype.itemsize
            span = torch.empty(n, dtype=dtype, device="cpu")
        super().__init__(span, sizes)

    def separate_from(self, other: PackedTensors) -> PackedTensors:
        """Use a copy if memory is shared with tensors that will be overwritten, which MPI forbids. Return itself."""
        if np.may_share_memory(as_bytes(self.flat), as_bytes(other.flat)):
            self.is_copy, self.flat = True, torch.empty_like(self.flat)
        return self

    def copy_in(self) -> None:
        """Copy the tensors' values to the block, if it is a copy."""
        if self.is_copy:
            for tensor, part in zip(self._tensors, self._parts(), strict=True):
                source = tensor if part.dtype == tensor.dtype else tensor_bytes(tensor)
                part.copy_(source.reshape(-1))

    def copy_out(self) -> None:
        """Copy the block to the tensors, if it is a copy."""
        if self.is_copy:
            with torch.inference_mode():  # tensors made in this mode can be written in this mode alone
                for tensor, part in zip(self._tensors, self._parts(), strict=True):
                    values = part if part.dtype == tensor.dtype else part.clone().view(tensor.dtype)
                    tensor.copy_(values.view(tensor.shape))

    def _parts(self) -> Sequence[Tensor]:
        itemsize = self.flat.element_size()
        return torch.split(self.flat, [tensor.nbytes // itemsize for tensor in self._tensors])


def as_bytes(flat: Tensor) -> Bytes:
    """Return the memory of a contiguous vector."""
    return as_array(flat, np.uint8)


def as_array(flat: Tensor, dtype: DTypeLike) -> AnyArray:
    """Return the memory of a contiguous vector as elements of a NumPy dtype.

    `Tensor.numpy` would forbid the tensor's owner to resize its storage later, as FSDP does.
    """
    nbytes = flat.numel() * flat.element_size()
    if not nbytes:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(flat.data_ptr())
    memory.owner = flat  # the array keeps this object, and with it the tensor
    return np.frombuffer(memory, dtype)


def _span(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the memory of adjacent contiguous tensors as a vector; None for other tensors."""
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
        return tensors[0].reshape(-1)
    return first.view(-1) if n == first.numel() else first.as_strided((n,), (1,))


def rows(tensor: Tensor, n: int) -> list[Tensor]:
    """Return `n` equal parts as views: of a contiguous tensor's memory, or else along the first dimension."""
    contiguous = tensor.is_contiguous()
    if (tensor.numel() if contiguous else tensor.shape[0]) % n:
        cure = "" if contiguous else " along the first dimension: pass a contiguous one"
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot be cut in {n} equal parts{cure}")
    return list((tensor.detach().view(-1) if contiguous else tensor.detach()).tensor_split(n))


def split_sizes(tensor: Tensor, splits: Sequence[int], n: int) -> list[int]:
    """Return the bytes of each of `n` parts along the first dimension; without `splits` the parts are equal."""
    length = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if length % n:
            raise ValueError(f"the first dimension, {length}, cannot be cut in {n} equal parts: pass split sizes")
        splits = [length // n] * n
    if len(splits) != n or sum(splits) != length or min(splits) < 0:
        raise ValueError(f"split sizes {list(splits)} do not cut a first dimension of {length} for {n} ranks")
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    return [split * row for split in splits]


class StagingTensors:
    """Pinned host copies of a call's tensors on devices; the call's other tensors stand for themselves."""

    def __init__(self) -> None:
        self._read: list[_StagingTensor] = []
        self._written: list[_StagingTensor] = []
        self._used = False

    def __bool__(self) -> bool:
        return self._used

    def stage(self, operand: Operand, read: bool, written: bool) -> Operand:
        """Replace tensors on devices that can be reached by host copies; those of a list and dtype are adjacent.

        Raises MemoryError if memory is short, pinned or on the device.
        """
        if isinstance(operand, Tensor):
            return self._stage([operand], read, written)[0]
        if not isinstance(operand, list | tuple):
            return operand
        tensors = [one for one in operand if isinstance(one, Tensor)]
        if tensors and len(tensors) == len(operand) and len({one.dtype for one in tensors}) == 1:
            return self._stage(tensors, read, written)
        return [self.stage(one, read, written) for one in operand]

    def _stage(self, tensors: list[Tensor], read: bool, written: bool) -> list[Tensor]:
        found = [_device_of(tensor) for tensor in tensors]
        device = found[0]
        if any(one is not device for one in found):
            return [host for tensor in tensors for host in self._stage([tensor], read, written)]
        if device is None:
            return tensors
        self._used = True
        nbytes = sum(tensor.nbytes for tensor in tensors)
        try:
            # an empty array of a device has a stride that `view` refuses
            memory = (
                torch.from_numpy(device.pinned(nbytes)) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            parts = torch.split(memory.view(tensors[0].dtype), [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                if tensor.numel():
                    staging = _StagingTensor(device, tensor, part, read)
                    self._read += [staging] * read
                    self._written += [staging] * written
        except (RuntimeError, BufferError) as error:  # PyTorch raises these if memory is short
            problem = f"{nbytes} bytes of {device.name} cannot be taken through pinned memory ({error})"
            raise MemoryError(problem) from error
        return [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]

    def copy_to_host(self, call: Call) -> Steps:
        """Copy the tensors that are read to the host, at the beginning of a call."""
        if self._read:
            yield from run_before_arrival(call, _copied(call, self._read, _StagingTensor.copy_to_host, "from"))

    def copy_to_device(self, call: Call) -> Steps:
        """Copy the host copies of tensors that are written to the device."""
        if self._written:
            yield from _copied(call, self._written, _StagingTensor.copy_to_device, "to")


class _StagingTensor:
    def __init__(self, device: Device, tensor: Tensor, memory: Tensor, read: bool) -> None:
        self.device, self._tensor = device, tensor
        own = tensor.detach()
        if own.is_contiguous() or read:
            self._plain = own.resolve_conj().resolve_neg().contiguous()  # `own` itself, or a copy
        else:
            self._plain = torch.empty_like(own, memory_format=torch.contiguous_format)
        self._is_copy = self._plain is not own
        self._vector = device.take(tensor_bytes(self._plain)).vector
        self._host = memory.view(torch.uint8).numpy()

    def copy_to_host(self) -> Testable | None:
        return self.device.copy(self._vector, self._host)

    def copy_to_device(self) -> Testable | None:
        copy = self.device.copy(self._host, self._vector)
        if not self._is_copy:
            return copy
        self.device.run(self._take_copy)
        return self.device.done()

    def _take_copy(self) -> None:
        with torch.inference_mode():  # tensors made in this mode can be written in this mode alone
            self._tensor.copy_(self._plain)


def _copied(
    call: Call, tensors: Sequence[_StagingTensor], begin: Callable[[_StagingTensor], Testable | None], way: str
) -> Generator[bool, None, None]:
    call.owners = (*call.owners, tensors)  # they must outlive the call if it fails while they are copied
    use_in_background(call, tensors[0].device)
    problem = f"the copy {way} {tensors[0].device.name} does not end, or the device does not come to it"
    for copy in [begin(tensor) for tensor in tensors]:
        yield from await_operation(call, partial(_itself, copy), problem)


def _itself(copy: Testable | None) -> Testable | None:
    return copy


def _device_of(tensor: Tensor) -> Device | None:
    """Return the device of a dense tensor; None for the CPU, and for tensors that `require_dense` will refuse."""
    if tensor.device.type == "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return named(str(tensor.device))
    except ValueError:
        return None
