"""GPUs of NVIDIA and AMD, by PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives.devices.device import Bytes, Taken
from collectives.testable import Testable


class TorchDevice:
    """A GPU of NVIDIA or AMD, by PyTorch; see `Device`."""

    def __init__(self, torch: Any, index: int) -> None:
        self.name, self._torch = f"cuda:{index}", torch
        self._index = index
        self._stream, self._to_host, self._to_device = (torch.cuda.Stream(index) for _ in range(3))
        self._launched: Any = None  # an event behind all kernels; None: there may be newer ones than the last event
        self._marking = threading.Lock()
        self._launching = (
            threading.RLock()
        )  # Triton loads a kernel at its first launch, and not for two threads at once

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Launch kernels."""
        try:
            with self._torch.cuda.stream(self._stream):
                yield
        finally:
            with self._marking:
                self._launched = None

    def pinned(self, nbytes: int) -> Bytes:
        """See `Device`; PyTorch keeps memory that is freed, and hands it out again."""
        memory: Bytes = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    def take(self, array: Any) -> Taken:
        """See `Device`.

        CuPy and JAX let the current stream, here the device's own, wait for theirs. PyTorch lets it wait for the
        current one, which would be itself.
        """
        self._stream.wait_stream(self._torch.cuda.current_stream(self._index))
        with self._on_stream():
            tensor = self._torch.from_dlpack(array)
        contiguous = tensor.is_contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        return Taken(
            name, tuple(tensor.shape), contiguous, tensor.data_ptr(), tensor.reshape(-1) if contiguous else None
        )

    def zeros(self, n: int, dtype: str) -> Any:
        """See `Device`."""
        with self._on_stream():
            return self._torch.zeros(n, dtype=getattr(self._torch, dtype), device=self.name)

    def run(self, work: Callable[[], object]) -> None:
        """See `Device`."""
        with self._launching, self._on_stream():
            work()

    def _behind_kernels(self) -> Any:
        """An event behind all kernels so far, but behind no copy that has begun since the last of them."""
        with self._marking:
            if self._launched is None:
                self._launched = self._stream.record_event()
            return self._launched

    def copy(self, source: Any, target: Any) -> Testable:
        """See `Device`."""
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

    def use(self) -> None:
        """See `Device`."""
        self._torch.cuda.set_device(self._index)

    def done(self) -> Testable:
        """See `Device`."""
        return Event(self._stream.record_event().query)

    def _bytes(self, vector: Any) -> Any:
        if isinstance(vector, np.ndarray):
            return self._torch.from_numpy(vector.view(np.uint8))
        return vector.view(self._torch.uint8)


class Event:
    """What a device has yet to do; see `Testable`.

    Parameters
    ----------
    done : callable
        Whether it is done.
    ends : object
        Kept alive until then.
    """

    __slots__ = ("_done", "_ends")

    def __init__(self, done: Callable[[], bool], ends: object = None) -> None:
        self._done, self._ends = done, ends

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """See `Testable`."""
        if not self._done():
            return False
        self._ends = None
        return True
