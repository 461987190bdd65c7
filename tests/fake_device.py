"""A device that is none: its memory is the host's, and all it does happens only when its end has been asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives.arrays import CUDA, MAKERS, Taken

_interpreter = threading.Lock()  # Triton's, which runs one kernel at a time
POLLS = 3
GARBAGE = 0xA5


class FakeDevice:
    """Device of tests; copies happen as late as they may: to the host behind kernels that came later.

    Attributes
    ----------
    copied : list of int
        Bytes of each copy that has happened.
    broken : Exception or None
        What the next copy raises.
    has_memory : bool
        Whether there is pinned memory.
    used_by : set of str
        Threads that have made it their current one.
    """

    def __init__(self, index: int = 0) -> None:
        self.name, self.copied = f"fake:{index}", list[int]()
        self.broken: Exception | None = None
        self.has_memory = True
        self.used_by = set[str]()
        self._kernels: deque[Callable[[], object]] = deque()  # copies to the device among them
        self._to_host: deque[tuple[int, Callable[[], None]]] = deque()  # each behind so many kernels
        self._launched = self._run = self._begun = self._copied = 0
        self._last_kernel = 0  # how many were launched up to the last one that is no copy
        self._queuing = threading.RLock()  # for ranks' threads, as the numbers are places in the queues

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        if not self.has_memory:
            raise RuntimeError("out of memory")
        return np.full(nbytes, GARBAGE, np.uint8)

    def zeros(self, n: int, dtype: str) -> Any:
        return torch.zeros(n, dtype=getattr(torch, dtype))

    def take(self, array: FakeArray) -> Taken:
        there = array.there
        contiguous = there.flags.c_contiguous
        vector = torch.from_numpy(there.reshape(-1)).view(getattr(torch, array.dtype)) if contiguous else None
        return Taken(array.dtype, there.shape, contiguous, there.ctypes.data, vector)

    def run(self, work: Callable[[], object]) -> None:
        with self._queuing:
            self._launch(work)
            self._last_kernel = self._launched

    def _launch(self, work: Callable[[], object]) -> None:
        self._kernels.append(work)
        self._launched += 1

    def copy(self, source: Any, target: Any) -> Event:
        if self.broken is not None:
            raise self.broken

        def copy() -> None:
            self._copy(as_bytes(source), as_bytes(target))

        with self._queuing:
            if isinstance(target, np.ndarray):
                self._to_host.append((self._last_kernel, copy))
                self._begun += 1
                return Event(self, self._last_kernel, self._begun)
            self._launch(copy)
            return Event(self, self._launched, 0)

    def use(self) -> None:
        self.used_by.add(threading.current_thread().name)

    def done(self) -> Event:
        return Event(self, self._launched, 0)

    def _copy(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        target[:] = source
        self.copied.append(source.size)

    def go_on(self, kernels: int, copies: int) -> None:
        """Run so many kernels, of all, and make so many copies to the host; nothing else, though it was begun."""
        with _interpreter:
            while self._copied < copies:
                behind, copy = self._to_host.popleft()
                self._run_kernels(behind)
                copy()
                self._copied += 1
            self._run_kernels(kernels)

    def _run_kernels(self, count: int) -> None:
        while self._run < count:
            self._kernels.popleft()()
            self._run += 1


def fake_devices(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeDevice]:
    """Have devices made when they are asked for; returns those that are made."""
    made: dict[int, FakeDevice] = {}
    monkeypatch.setitem(MAKERS, CUDA, lambda index: made.setdefault(index, FakeDevice(index)))
    return made


def as_bytes(vector: Any) -> NDArray[np.uint8]:
    """View a vector of NumPy or PyTorch."""
    array: NDArray[Any] = vector if isinstance(vector, np.ndarray) else vector.view(torch.uint8).numpy()
    return array.view(np.uint8)


class Event:
    """See `collectives.progress.polling.Testable`."""

    def __init__(self, device: FakeDevice, kernels: int, copies: int) -> None:
        self._device, self._awaited, self._asked = device, (kernels, copies), 0

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        self._asked += 1
        if self._asked <= POLLS:
            return False
        self._device.go_on(*self._awaited)
        return True


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
