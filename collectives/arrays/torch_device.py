"""GPUs of NVIDIA and AMD, by PyTorch: memory, copies and sums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from collectives.annotations import Array, Bytes, Tensor, Testable, override
from collectives.arrays.device import Device, Taken

OPERATIONS = {"sum": "add", "mean": "add", "min": "minimum", "max": "maximum"}
"""Names in PyTorch of the functions that `collectives.arrays.elements.COMBINE` has for the host."""


class TorchDevice(Device):
    """A GPU of NVIDIA or AMD, by PyTorch."""

    def __init__(self, torch: ModuleType, index: int) -> None:
        self.name, self._torch = f"cuda:{index}", torch
        self._index = index
        self._stream, self._to_host, self._to_device = (torch.cuda.Stream(index) for _ in range(3))
        self._launched: Any = None  # an event behind all kernels; None: there may be newer ones than the last event
        self._marking = threading.Lock()
        self._launching = threading.RLock()  # Triton loads a kernel at its first launch, not for two threads at once

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        try:
            with self._torch.cuda.stream(self._stream):
                yield
        finally:
            with self._marking:
                self._launched = None

    @override
    def pinned(self, nbytes: int) -> Bytes:
        # PyTorch keeps pinned memory that is freed, and hands it out again
        memory: Bytes = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    @override
    def take(self, array: Array) -> Taken:
        # CuPy and JAX let the current stream, here the device's own, wait for theirs. PyTorch lets it wait for the
        # current stream, which would be itself.
        self._stream.wait_stream(self._torch.cuda.current_stream(self._index))
        with self._on_stream():
            tensor = self._torch.from_dlpack(array)
        contiguous = tensor.is_contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        return Taken(
            name, tuple(tensor.shape), contiguous, tensor.data_ptr(), tensor.reshape(-1) if contiguous else None
        )

    @override
    def zeros(self, n: int, dtype: str) -> Tensor:
        with self._on_stream():
            return self._torch.zeros(n, dtype=getattr(self._torch, dtype), device=self.name)

    @override
    def run(self, work: Callable[[], object]) -> None:
        with self._launching, self._on_stream():
            work()

    def _behind_kernels(self) -> Any:
        """Return an event after all kernels so far, and before any copy that has begun since the last kernel."""
        with self._marking:
            if self._launched is None:
                self._launched = self._stream.record_event()
            return self._launched

    @override
    def copy(self, source: Array, target: Array) -> Testable:
        from_, to = self._bytes(source), self._bytes(target)
        to_host = isinstance(target, np.ndarray)
        copies = self._to_host if to_host else self._to_device
        copies.wait_event(self._behind_kernels())
        with self._torch.cuda.stream(copies):
            to.copy_(from_, non_blocking=True)
        event = copies.record_event()
        if not to_host:
            self._stream.wait_event(event)
        return Event(event.query, (from_, to))

    @override
    def use(self) -> None:
        self._torch.cuda.set_device(self._index)

    @override
    def done(self) -> Testable:
        return Event(self._stream.record_event().query)

    def _bytes(self, vector: Array) -> Tensor:
        if isinstance(vector, np.ndarray):
            return self._torch.from_numpy(vector.view(np.uint8))
        return vector.view(self._torch.uint8)


class Event(Testable):
    """Work of a device that is under way.

    Parameters
    ----------
    done : callable
        Returns True once the work is done.
    ends : object
        Kept alive until then.
    """

    __slots__ = ("_done", "_ends")

    def __init__(self, done: Callable[[], bool], ends: object = None) -> None:
        self._done, self._ends = done, ends

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        if not self._done():
            return False
        self._ends = None
        return True


@cache
def _torch() -> Any:
    import torch

    return torch


def as_type(vector: Tensor, dtype: str) -> Tensor:
    """View a vector as another type of PyTorch."""
    return vector.view(getattr(_torch(), dtype))


def combine(op: str, held: Tensor, incoming: Tensor, out: Tensor) -> None:
    """Overwrite `out` with the sum, minimum or maximum of two vectors; overflow is infinite, NaN stays NaN.

    The caller chooses the order and the stream.
    """
    getattr(_torch(), OPERATIONS[op])(held, incoming, out=out)


def divide(vector: Tensor, divisor: Tensor) -> None:
    """Divide in place by a vector of one element. For a number of the host PyTorch multiplies with its reciprocal."""
    _torch().div(vector, divisor, out=vector)
