"""A device that is none: its memory is the host's, and all it does happens only when its end has been asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.devices import CUDA, Taken

_interpreter = threading.Lock()  # Triton's, which runs one kernel at a time
POLLS = 3
GARBAGE = 0xA5


class FakeDevice:
    """See `collectives.devices.Device`. What one device does happens in order.

    Attributes
    ----------
    copied : list of int
        Bytes of each copy that has happened.
    broken : Exception or None
        What the next copy raises.
    has_memory : bool
        Whether there is pinned memory.
    """

    def __init__(self, index: int = 0) -> None:
        self.name, self.copied = f"fake:{index}", list[int]()
        self.broken: Exception | None = None
        self.has_memory = True
        self._queue: deque[Callable[[], None]] = deque()

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        if not self.has_memory:
            raise RuntimeError("out of memory")
        return np.full(nbytes, GARBAGE, np.uint8)

    def zeros(self, n: int, dtype: str) -> Any:
        return torch.zeros(n, dtype=getattr(torch, dtype))

    def take(self, array: FakeArray) -> Taken:
        there = array.there
        contiguous = there.flags.c_contiguous
        vector = torch.from_numpy(there.reshape(-1)) if contiguous else None
        return Taken(array.dtype, there.shape, contiguous, there.ctypes.data, vector)

    def run(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def copy(self, source: Any, target: Any) -> Event:
        if self.broken is not None:
            raise self.broken
        self._queue.append(lambda: self._copy(as_bytes(source), as_bytes(target)))
        return self.done()

    def done(self) -> Event:
        event = Event(self)
        self._queue.append(event.come)
        return event

    def _copy(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        target[:] = source
        self.copied.append(source.size)

    def go_on(self, event: Event) -> None:
        """Do what is queued up to an event."""
        with _interpreter:
            while not event.has_come:
                self._queue.popleft()()


def as_bytes(vector: Any) -> NDArray[np.uint8]:
    """View a vector of NumPy or PyTorch."""
    array: NDArray[Any] = vector if isinstance(vector, np.ndarray) else vector.numpy()
    return array.view(np.uint8)


class Event:
    """See `collectives.progress.polling.Testable`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._asked, self.has_come = device, 0, False

    def come(self) -> None:
        self.has_come = True

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        self._asked += 1
        if self._asked > POLLS:
            self._device.go_on(self)
        return self.has_come


class FakeArray:
    """An array that only its device can read; `there` is for the test."""

    def __init__(self, there: NDArray[Any], dtype: str | None = None, index: int = 0) -> None:
        self.there, self.dtype, self._index = there, dtype or there.dtype.name, index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.there.shape

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("the host cannot read an array of a device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._index

    def new_empty(self, shape: tuple[int, ...]) -> FakeArray:
        return FakeArray(np.empty(shape, self.there.dtype), self.dtype, self._index)
