"""A device that is none: its memory is NumPy's, and a copy happens only when its end has been asked for some times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.devices import CUDA, Taken

POLLS = 3
GARBAGE = 0xA5


class FakeDevice:
    """See `collectives.devices.Device`. Copies of one device happen in order.

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

    def take(self, array: FakeArray) -> Taken:
        there = array.there
        contiguous = there.flags.c_contiguous
        memory = there.reshape(-1).view(np.uint8) if contiguous else None
        return Taken(array.dtype, there.shape, contiguous, there.ctypes.data, memory)

    def copy(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> Copy:
        if self.broken is not None:
            raise self.broken
        copy = Copy(self)
        self._queue.append(lambda: self._copy(copy, source, target))
        return copy

    def _copy(self, copy: Copy, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        target[:] = source
        self.copied.append(source.size)
        copy.done = True

    def go_on(self, copy: Copy) -> None:
        """Do what is queued up to a copy."""
        while not copy.done:
            self._queue.popleft()()


class Copy:
    """See `collectives.progress.polling.Testable`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._asked, self.done = device, 0, False

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        self._asked += 1
        if self._asked > POLLS:
            self._device.go_on(self)
        return self.done


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
