"""Tensors on devices, each with a twin in pinned memory of the host, which travels in its place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives import devices
from collectives.devices import Device, Staging
from collectives.execution.handle import Call, Steps
from collectives.execution.staged import awaited, late, use_in_background
from collectives.testable import Testable


class Twin:
    """A tensor on a device, and its twin.

    Parameters
    ----------
    device : Device
    tensor : Tensor
        Dense, with elements.
    read : bool
        Whether its values are asked for.

    Attributes
    ----------
    tensor : Tensor
    host : Tensor
        Contiguous, of the tensor's shape and dtype.

    Raises
    ------
    MemoryError
        There is no memory, pinned or on the device.
    """

    def __init__(self, device: Device, tensor: Tensor, read: bool) -> None:
        self.device, self.tensor = device, tensor
        own = tensor.detach()
        try:
            if own.is_contiguous() or read:
                self._plain = own.resolve_conj().resolve_neg().contiguous()  # itself, or a copy beside it
            else:
                self._plain = torch.empty_like(own, memory_format=torch.contiguous_format)
            taken = device.take(self._plain.view(-1).view(torch.uint8))
            self._staging = Staging(device, taken, self._plain.nbytes)
        except (RuntimeError, BufferError) as error:  # PyTorch's, also for want of memory
            problem = f"{tensor.nbytes} bytes of {device.name} cannot be taken through pinned memory ({error})"
            raise MemoryError(problem) from error
        self._is_copy = self._plain is not own
        self.host = torch.from_numpy(self._staging.host).view(tensor.dtype).view(tensor.shape)

    def fetch(self) -> Testable:
        """Begin to overwrite the twin."""
        return self._staging.fetch()

    def deliver(self) -> Testable:
        """Begin to overwrite the tensor."""
        copy = self._staging.deliver()
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

        Raises
        ------
        MemoryError
            There is no pinned memory.
        """
        if isinstance(operand, Tensor):
            device = _device_of(operand)
            if device is None:
                return operand
            if not operand.numel():
                host = torch.empty_like(operand, device="cpu")
            else:
                twin = Twin(device, operand, read)
                host = twin.host
                self._read += [twin] * read
                self._written += [twin] * written
            self._pairs.append((host, operand))
            return host
        return [self.of(one, read, written) for one in operand] if isinstance(operand, list | tuple) else operand

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


def _all(call: Call, twins: Sequence[Twin], begin: Callable[[Twin], Testable], way: str) -> Generator[bool, None, None]:
    call.owners = (*call.owners, twins)  # should the call fail while they are copied
    use_in_background(call, twins[0].device)
    problem = f"the copy {way} {twins[0].device.name} does not end, or the device does not come to it"
    for copy in [begin(twin) for twin in twins]:
        yield from awaited(call, partial(_itself, copy), problem)


def _itself(copy: Testable) -> Testable:
    return copy


def _device_of(tensor: Tensor) -> Device | None:
    """The device of a dense tensor; None: it is the host's, or what is wrong with it is told elsewhere."""
    if tensor.device.type == "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return devices.named(str(tensor.device))
    except ValueError:
        return None
