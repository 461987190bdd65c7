"""Memory of a device as a memory space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import Array, Bytes, Words, override
from collectives.arrays import Device, Queued, wait
from collectives.execution.payload import MessageMemory
from mpicomp.spaces.finite_flag import DeviceFlag
from mpicomp.spaces.host_space import Space
from mpicomp.spaces.mirror import DeviceMirror, DevicePacked

_INTEGERS: dict[int, Any] = {}  # PyTorch's types by their length in bytes, without an import of PyTorch


class DeviceSpace(Space):
    """Memory of a device; work that its methods begin may end later."""

    kind, is_host, word = "cuda", False, "int64"

    def __init__(self, device: Device) -> None:
        self.device, self.name = device, device.name

    @override
    def zeros(self, n: int, dtype: DTypeLike) -> Array:
        return self.device.zeros(n, np.dtype(dtype).name)

    empty = zeros

    @override
    def words(self, out: Array) -> Array:
        nbytes = out.element_size()
        if nbytes not in _INTEGERS:
            _INTEGERS[nbytes] = self.device.zeros(0, f"int{8 * nbytes}").dtype
        return out.view(_INTEGERS[nbytes])

    @override
    def message(self, words: Array) -> MessageMemory:
        from mpi4py import MPI  # states are converted without it

        return [MPI.buffer.fromaddress(words.data_ptr(), 8 * len(words)), 8 * len(words), MPI.BYTE]

    @override
    def mirror(self, there: Array) -> DeviceMirror:
        return DeviceMirror(self.device, there)

    @override
    def packed(self, words: Sequence[Words]) -> DevicePacked:
        return DevicePacked(self.device, words)

    @override
    def overwrite(self, vector: Array, values: Array) -> None:
        if isinstance(values, np.ndarray):
            wait(self.mirror(vector).send(values))
        else:
            self.device.run(partial(vector.copy_, values))

    @override
    def launch(self, work: Callable[..., object], *arguments: Any) -> None:
        self.device.run(partial(work, *arguments))

    @override
    def bound(self, work: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self.launch, work)

    @override
    def done(self) -> Queued | None:
        return self.device.done()

    @override
    def flag(self, memory: tuple[Array, Bytes] | None = None) -> DeviceFlag:
        return DeviceFlag(self.device, memory)
