"""What `TorchDevice` asks of PyTorch, where streams are lists of work that is done when its end has been asked for.

As in PyTorch each thread has a current GPU, the first one until it chooses another, and work on a GPU that is not
current, or setting a GPU, makes a context there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from collectives.annotations import AnyArray
from collectives.arrays import TorchDevice

INDEX = 1  # of the GPU: the first one is that of threads that choose none


class Stream:
    """Stand in for `torch.cuda.Stream`."""

    def __init__(self, torch: FakeTorch, index: int) -> None:
        self.work: list[Callable[[], object]] = []
        self.device_index, self._torch = index, torch
        self.stream_id, self.device_type = id(self), 1
        torch.streams[self.stream_id] = self
        self._done = 0

    def record_event(self) -> Event:
        self._torch.touch()
        return Event(self._torch, self, len(self.work))

    def wait_event(self, event: Event) -> None:
        self._torch.touch()
        self.work.append(event.happen)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def go_on(self, count: int) -> None:
        """Do so much of the work, and on other streams what it waits for; nothing else."""
        while self._done < count:
            self._done += 1
            self.work[self._done - 1]()


class Event:
    """Stand in for `torch.cuda.Event`."""

    def __init__(self, torch: FakeTorch, stream: Stream, count: int) -> None:
        self._torch, self._stream, self._count = torch, stream, count

    def happen(self) -> None:
        self._stream.go_on(self._count)

    def query(self) -> bool:
        self._torch.touch()
        self.happen()
        return True


class Vector:
    """A tensor on the device, or one on the host's memory; `values` are for the test."""

    def __init__(self, torch: FakeTorch, values: AnyArray) -> None:
        self._torch, self.values = torch, values

    def view(self, dtype: Any) -> Vector:
        return Vector(self._torch, self.values.view(dtype))

    def copy_(self, source: Vector, non_blocking: bool) -> None:
        assert non_blocking
        ends = weakref.ref(self.values), weakref.ref(source.values)

        def copy() -> None:
            to, from_ = ends[0](), ends[1]()
            assert to is not None and from_ is not None, "memory was handed out again before the copy"  # noqa: PT018
            np.copyto(to, from_)

        self._torch.launch(copy)

    def numpy(self) -> AnyArray:
        return self.values


class FakeTorch:
    """Stand in for `torch`, and for its module `cuda`.

    Attributes
    ----------
    contexts : set of int
        GPUs on which this process holds a context.
    is_capturing : bool
        Whether the current streams capture a graph.
    ranges : list of str
        Ranges that profiles would show.
    depth : int
        Ranges that have not ended.
    streams : dict of int to Stream
        By their numbers.

    Parameters
    ----------
    has_private : bool
        The functions that PyTorch's contexts call are there.
    """

    uint8, version = np.uint8, SimpleNamespace(hip=None)

    def __init__(self, has_private: bool = True) -> None:
        self.cuda = self.nvtx = self
        self._C = self if has_private else None
        self.streams: dict[int, Stream] = {}
        self.contexts = set[int]()
        self.is_capturing = False
        self.ranges: list[str] = []
        self.depth = 0
        self._thread = threading.local()
        self._defaults = {index: Stream(self, index) for index in range(INDEX + 1)}

    def Stream(self, index: int) -> Stream:  # noqa: N802 - PyTorch's name
        return Stream(self, index)

    def touch(self) -> None:
        """Do what makes a context on the thread's current GPU."""
        self.contexts.add(self.current_device())

    def current_device(self) -> int:
        return getattr(self._thread, "index", 0)

    def set_device(self, index: int) -> None:
        self._thread.index = index
        self.touch()

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self._cuda_exchangeDevice(index)
        try:
            yield
        finally:
            self._cuda_maybeExchangeDevice(before)

    def _streams(self) -> dict[int, Stream]:
        if not hasattr(self._thread, "streams"):
            self._thread.streams = dict(self._defaults)
        streams: dict[int, Stream] = self._thread.streams
        return streams

    def current_stream(self, index: int) -> Stream:
        return self._streams()[index]

    def _set_stream(self, stream: Stream) -> None:
        self._streams()[stream.device_index] = stream
        if stream.device_index != self.current_device():
            self.set_device(stream.device_index)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, there = self.current_stream(self.current_device()), self.current_stream(stream.device_index)
        self._set_stream(stream)
        try:
            yield
        finally:
            self._set_stream(there)
            self._set_stream(before)

    def _cuda_exchangeDevice(self, index: int) -> int:  # noqa: N802 - PyTorch's name
        before, self._thread.index = self.current_device(), index
        return before

    _cuda_maybeExchangeDevice = _cuda_exchangeDevice  # noqa: N815 - PyTorch's name

    def _cuda_getCurrentStream(self, index: int) -> tuple[int, int, int]:  # noqa: N802 - PyTorch's name
        stream = self.current_stream(index)
        return stream.stream_id, stream.device_index, stream.device_type

    def _cuda_setStream(self, stream_id: int, device_index: int, device_type: int) -> None:  # noqa: N802 - PyTorch's name
        self._set_stream(self.streams[stream_id])

    def launch(self, work: Callable[[], object]) -> None:
        """Have the current stream do something."""
        self.touch()
        self.current_stream(self.current_device()).work.append(work)

    def is_current_stream_capturing(self) -> bool:
        self.touch()
        return self.is_capturing

    def range_push(self, name: str) -> None:
        self.ranges.append(name)
        self.depth += 1

    def range_pop(self) -> None:
        self.depth -= 1

    def empty(self, nbytes: int, dtype: Any, device: str, pin_memory: bool) -> Vector:
        assert device == "cpu"
        assert pin_memory
        self.touch()
        return Vector(self, np.empty(nbytes, dtype))

    def from_numpy(self, array: AnyArray) -> Vector:
        return Vector(self, array)

    def from_dlpack(self, array: Any) -> Any:
        self.touch()
        return array


class StreamsDevice(TorchDevice):
    """A `TorchDevice` on such streams."""

    def __init__(self, has_private: bool = True) -> None:
        self.torch = FakeTorch(has_private)
        super().__init__(self.torch, INDEX)

    def zeros(self, n: int, dtype: str) -> Any:
        return Vector(self._torch, np.zeros(n, dtype))

    def run(self, work: Callable[[], object]) -> None:
        def launched() -> None:
            self._torch.launch(work)

        launched.__name__ = work.__name__
        super().run(launched)
