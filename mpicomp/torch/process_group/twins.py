"""Tensors on devices, each with a twin in pinned memory of the host, which travels in its place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives import arrays
from collectives.annotations import Testable
from collectives.arrays import Device
from collectives.execution.handle import Call, Steps
from collectives.execution.staged import awaited, late, use_in_background


class Twin:
    """A tensor on a device, and its twin.

    Parameters
    ----------
    device : Device
    tensor : Tensor
        Dense, with elements.
    memory : Tensor
        Pinned, of the tensor's dtype: as many elements.
    read : bool
        Whether its values are asked for.
    """

    def __init__(self, device: Device, tensor: Tensor, memory: Tensor, read: bool) -> None:
        self.device, self.tensor = device, tensor
        own = tensor.detach()
        if own.is_contiguous() or read:
            self._plain = own.resolve_conj().resolve_neg().contiguous()  # itself, or a copy beside it
        else:
            self._plain = torch.empty_like(own, memory_format=torch.contiguous_format)
        self._is_copy = self._plain is not own
        self._there = device.take(self._plain.view(-1).view(torch.uint8)).vector
        self._host = memory.view(torch.uint8).numpy()

    def fetch(self) -> Testable | None:
        """Begin to overwrite the twin."""
        return self.device.copy(self._there, self._host)

    def deliver(self) -> Testable | None:
        """Begin to overwrite the tensor."""
        copy = self.device.copy(self._host, self._there)
        if not self._is_copy:
            return copy
        self.device.run(self._take_copy)
        return self.device.done()

    def _take_copy(self) -> None:
        with torch.inference_mode():  # tensors that were made in it can be written in it alone
            self.tensor.copy_(self._plain)


class Twins:
    """The twins of a call's tensors."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # twins and their tensors
        self._read: list[Twin] = []
        self._written: list[Twin] = []

    def of(self, operand: Any, read: bool, written: bool) -> Any:
        """A tensor, or nested lists of some, with twins for those on devices that can be reached.

        Twins of a list of one dtype follow each other in memory.

        Raises
        ------
        MemoryError
            There is no memory, pinned or on the device.
        """
        if isinstance(operand, Tensor):
            return self._of([operand], read, written)[0]
        if not isinstance(operand, list | tuple):
            return operand
        if operand and all(isinstance(one, Tensor) for one in operand) and len({one.dtype for one in operand}) == 1:
            return self._of(operand, read, written)
        return [self.of(one, read, written) for one in operand]

    def _of(self, tensors: Sequence[Tensor], read: bool, written: bool) -> list[Tensor]:
        """Tensors of one dtype, with twins for those on a device, which is the same for all, or one by one."""
        found = [_device_of(tensor) for tensor in tensors]
        device = found[0]
        if any(one is not device for one in found):
            return [twin for tensor in tensors for twin in self._of([tensor], read, written)]
        if device is None:
            return list(tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        try:
            memory = torch.from_numpy(device.pinned(nbytes)) if nbytes else torch.empty(0, dtype=torch.uint8)
            parts = torch.split(memory.view(tensors[0].dtype), [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                if tensor.numel():
                    twin = Twin(device, tensor, part, read)
                    self._read += [twin] * read
                    self._written += [twin] * written
        except (RuntimeError, BufferError) as error:  # PyTorch's, also for want of memory
            problem = f"{nbytes} bytes of {device.name} cannot be taken through pinned memory ({error})"
            raise MemoryError(problem) from error
        hosts = [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]
        self._pairs += zip(hosts, tensors, strict=True)
        return hosts

    def originals(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, without twins."""
        known = {id(host): tensor for host, tensor in self._pairs}
        return [known.get(id(tensor), tensor) for tensor in tensors]

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def fetch(self, call: Call) -> Steps:
        """Overwrite the twins of tensors that are read, at the beginning of a call."""
        if self._read:
            yield from late(call, _all(call, self._read, Twin.fetch, "from"))

    def deliver(self, call: Call) -> Steps:
        """Overwrite tensors that are written by their twins."""
        if self._written:
            yield from _all(call, self._written, Twin.deliver, "to")


def _all(
    call: Call, twins: Sequence[Twin], begin: Callable[[Twin], Testable | None], way: str
) -> Generator[bool, None, None]:
    call.owners = (*call.owners, twins)  # should the call fail while they are copied
    use_in_background(call, twins[0].device)
    problem = f"the copy {way} {twins[0].device.name} does not end, or the device does not come to it"
    for copy in [begin(twin) for twin in twins]:
        yield from awaited(call, partial(_itself, copy), problem)


def _itself(copy: Testable | None) -> Testable | None:
    return copy


def _device_of(tensor: Tensor) -> Device | None:
    """The device of a dense tensor; None: it is the host's, or what is wrong with it is told elsewhere."""
    if tensor.device.type == "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return arrays.named(str(tensor.device))
    except ValueError:
        return None
