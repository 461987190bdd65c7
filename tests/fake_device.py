"""A device that is none: its memory is the host's, and its copies are made early, late, or in a random order.

Released memory is handed out again at once, full of NaN. Kernels and copies are counted, and a kernel that is launched
outside of `FakeDevice.run` of the device that holds its tensors fails.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet
from zlib import crc32

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from collectives.arrays import CUDA, MAKERS, Queued, Taken
from tests.interpreter import replace_language_once

_interpreter = threading.RLock()  # Triton's, which runs one kernel at a time
POLLS = 3
POISON = 0xFF  # NaN in every type of floating point
ORDERS = ("late", "early", "random")


def order_of_test() -> str:
    """Return the order of the running test's devices: `MPICOMP_DEVICE_ORDER`, or one that its name decides."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return os.environ.get("MPICOMP_DEVICE_ORDER") or ORDERS[crc32(name.encode()) % len(ORDERS)]


class Lease:
    """Memory that is in use; all views of it refer to this object."""

    def __init__(self, pool: Pool, memory: NDArray[np.uint8]) -> None:
        self._pool, self._memory = pool, memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        self._memory[:] = POISON
        self._pool.leased.pop(self._memory.ctypes.data, None)
        self._pool.free[self._memory.size].append(self._memory)


class Pool:
    """Memory that is handed out again, full of poison, as soon as it is released.

    Attributes
    ----------
    free : dict of int to list of arrays
        By their lengths.
    leased : dict of int to int
        Start and end of memory that is in use.
    """

    def __init__(self) -> None:
        self.free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self.leased: dict[int, int] = {}

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return poisoned memory."""
        room = max(64, 1 << (nbytes - 1).bit_length()) if nbytes else 64
        if self.free[room]:
            memory = self.free[room].pop()
        else:
            memory = np.full(room + 64, POISON, np.uint8)
            start = -memory.ctypes.data % 64
            memory = memory[start : start + room]
        self.leased[memory.ctypes.data] = memory.ctypes.data + room
        return np.asarray(Lease(self, memory))[:nbytes]


class NotReady(Exception):
    """Raised by work that other ranks have to come to: the device tries it again, and later work waits for it."""


class FakeDevice:
    """Device of tests.

    Parameters
    ----------
    index : int
    order : "late", "early", "random" or a number
        Copies and kernels happen when their end has been asked for, copies to the host behind kernels that came later;
        or at once; or some at a time, by a random sequence with this number as its seed.

    Attributes
    ----------
    copied : list of int
        Bytes of each copy that has happened.
    to_host, to_device : int
        Copies that have been begun in each direction.
    launches : list of str
        Kernels that have run: those of Triton by their names, and operations of PyTorch.
    forms : set of tuple
        Kernels of Triton with the types of their arguments: each is compiled once on a GPU.
    broken : Exception or None
        What the next copy raises.
    has_memory : bool
        Whether there is pinned memory.
    used_by : set of str
        Threads that have made it their current one.
    """

    def __init__(self, index: int = 0, order: str | int = "late") -> None:
        self.name, self.copied = f"fake:{index}", list[int]()
        self.to_host = self.to_device = 0
        self.launches, self.forms = list[str](), set[tuple[Any, ...]]()
        self.broken: Exception | None = None
        self.has_memory = True
        self.used_by = set[str]()
        self._memory, self._pinned, self._early = Pool(), Pool(), order == "early"
        _devices.add(self)
        self._random = None if order in ("early", "late") else random.Random(order)
        self._kernels: deque[Callable[[], object]] = deque()  # copies to the device among them
        self._to_host: deque[tuple[int, Callable[[], None]]] = deque()  # each behind so many kernels
        self._launched = self._run = self._begun = self._copied = 0
        self._last_kernel = 0  # how many were launched up to the last one that is no copy
        self._queuing = threading.RLock()  # for ranks' threads, as the numbers are places in the queues

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        if not self.has_memory:
            raise RuntimeError("out of memory")
        return self._pinned.take(nbytes)

    def zeros(self, n: int, dtype: str) -> Any:
        kind = getattr(torch, dtype)
        memory = self._memory.take(n * kind.itemsize)
        memory[:] = 0
        return torch.from_numpy(memory).view(kind)

    def take(self, array: FakeArray) -> Taken:
        there = array.there
        contiguous = there.flags.c_contiguous
        vector = torch.from_numpy(there.reshape(-1)).view(getattr(torch, array.dtype)) if contiguous else None
        return Taken(array.dtype, there.shape, contiguous, there.ctypes.data, vector)

    def follow(self) -> None:
        pass

    def run(self, work: Callable[[], object]) -> None:
        def counted() -> None:
            with counting(self):
                work()

        with self._queuing:
            self._launch(counted)
            self._last_kernel = self._launched
        self._go_ahead()

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
                self.to_host += 1
                event = Event(self, self._last_kernel, self._begun)
            else:
                self._launch(copy)
                self.to_device += 1
                event = self.done()
        self._go_ahead()
        return event

    def use(self) -> None:
        self.used_by.add(threading.current_thread().name)

    def done(self) -> KernelEvent:
        return KernelEvent(self, self._launched, 0)

    def _copy(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        target[:] = source
        self.copied.append(source.size)

    def _go_ahead(self) -> None:
        """Do what has been begun, as far as the order wants it."""
        if self._early:
            self.go_on(self._launched, self._begun)
        elif self._random is not None:
            with _interpreter:
                chance = self._random
                kernels = min(self._launched, self._run + chance.choice((0, 0, 1, 3)))
                copies = min(self._begun, self._copied + chance.choice((0, 0, 1, 3)))
                self.go_on(kernels, copies)

    def go_on(self, kernels: int, copies: int) -> None:
        """Run so many kernels, of all, and make so many copies to the host; nothing else, though it was begun."""
        with _interpreter:
            while self._copied < copies:
                behind, copy = self._to_host[0]
                self._run_kernels(behind)
                if self._run < behind:
                    return
                self._to_host.popleft()
                copy()
                self._copied += 1
            self._run_kernels(kernels)

    def _run_kernels(self, count: int) -> None:
        while self._run < count:
            work = self._kernels.popleft()
            try:
                work()
            except NotReady:
                self._kernels.appendleft(work)
                return
            self._run += 1


class Launches(TorchDispatchMode):
    """Counts operations of PyTorch that launch a kernel."""

    FREE: ClassVar[set[str]] = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach"}

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in self.FREE:
            self.device.launches.append(name)
        return func(*args, **(kwargs or {}))


_devices: WeakSet[FakeDevice] = WeakSet()
_current = threading.local()  # the device whose work a thread runs


@contextmanager
def counting(device: FakeDevice) -> Iterator[None]:
    """Make a device the current one of the thread, and count the kernels that are launched."""
    before = getattr(_current, "device", None)
    _current.device = device
    try:
        with Launches(device):
            yield
    finally:
        _current.device = before


def launched(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Count a kernel of Triton, which is about to run."""
    device = getattr(_current, "device", None)
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and (owner := owner_of(argument)) is not None and owner is not device:
            raise AssertionError(f"{kernel.__name__} is launched outside of {owner.name}'s run")
    if device is not None:
        device.launches.append(kernel.__name__)
        # numbers that are 1 or multiples of 16 have forms of their own, and so have addresses
        device.forms.add((kernel.__name__, *map(_form, arguments), *sorted(options.items())))


def _form(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return str(argument.dtype), argument.data_ptr() % 16 == 0
    return argument if argument is None or isinstance(argument, bool) else type(argument).__name__


def owner_of(tensor: torch.Tensor) -> FakeDevice | None:
    """Return the device that has handed out the memory of a tensor."""
    address = tensor.data_ptr()
    for device in list(_devices):
        if any(start <= address < stop for start, stop in device._memory.leased.copy().items()):
            return device
    return None


def _count_launches() -> None:
    """Have kernels of Triton's interpreter counted, once in a process."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    run = GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        launched(self.fn, arguments, options)
        with _disable_current_modes():
            return run(self, *arguments, **options)

    GridExecutor.__call__ = counted


_count_launches()
replace_language_once()


def fake_devices(monkeypatch: pytest.MonkeyPatch, in_order: str | int | None = None) -> dict[int, FakeDevice]:
    """Have devices made when they are asked for; returns those that are made."""
    made: dict[int, FakeDevice] = {}
    wanted = order_of_test() if in_order is None else in_order
    monkeypatch.setitem(MAKERS, CUDA, lambda index: made.setdefault(index, FakeDevice(index, wanted)))
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
        device, (kernels, copies) = self._device, self._awaited
        self._asked += 1
        if self._asked <= POLLS:
            device._go_ahead()
            if not (device._early or device._random is not None):
                return False
            return device._run >= kernels and device._copied >= copies
        device.go_on(kernels, copies)
        return device._run >= kernels and device._copied >= copies

    def happen(self) -> None:
        """Do what the event waits for."""
        while not self.Test():
            time.sleep(0)


class KernelEvent(Event, Queued):
    """Kernels and copies to the device."""

    @property
    def device(self) -> Any:
        return self._device

    def block(self, stream: Any) -> None:
        stream.wait_event(self)


class FakeStream:
    """Stream that uses results on devices.

    Parameters
    ----------
    eager : bool
        Work on this stream is done as soon as it is submitted, as PyTorch does on fake tensors.
    """

    def __init__(self, eager: bool = False) -> None:
        self.waits: list[KernelEvent] = []
        self._eager = eager

    def wait_event(self, event: KernelEvent) -> None:
        self.waits.append(event)
        if self._eager:
            self.reach()

    def reach(self) -> None:
        """Do the work that later work on this stream waits for."""
        while self.waits:
            self.waits.pop().happen()


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
