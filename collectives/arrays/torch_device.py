"""GPUs of NVIDIA and AMD, by PyTorch: memory, copies and sums."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np

from collectives.annotations import Array, Bytes, Tensor, Testable, override
from collectives.arrays.device import Device, Queued, Taken
from collectives.arrays.torch_events import CopyInTurn, Event, QueuedEvent

_Event = TypeVar("_Event", bound=Event)
OPERATIONS = {"sum": "add", "mean": "add", "min": "minimum", "max": "maximum"}
"""Names in PyTorch of the functions that `collectives.arrays.elements.COMBINE` has for the host."""

RELAXED = 2  # cudaStreamCaptureModeRelaxed, the same number in AMD's library
SHORT_BYTES = 1 << 20
"""Longest copy that waits its turn among the kernels: to start it on another stream takes the host as long as it lasts
(estimated), and three events more."""
MOST_UNMARKED = 64  # copies whose ends are kept without an event behind them


class TorchDevice(Device):
    """A GPU of NVIDIA or AMD, by PyTorch.

    Every call of PyTorch is made with this GPU as the thread's current one, and the GPU that was current before is
    current again afterwards. A thread that has chosen none would otherwise create a context on the first GPU, when a
    stream is left or an event is queried there: half a gigabyte for each rank, and an error where another rank has
    that GPU exclusively.
    """

    def __init__(self, torch: ModuleType, index: int) -> None:
        self.name, self._torch = f"cuda:{index}", torch
        self._index, self._call_on = index, with_current(torch, index)
        self._stream, self._to_host, self._to_device = (torch.cuda.Stream(index) for _ in range(3))
        self._launched: Any = None  # an event behind all kernels; None: there may be newer ones than the last event
        self._marked: QueuedEvent | None = None  # behind all that the stream of kernels has been given; None: not yet
        self._marking = threading.RLock()
        # Triton loads a kernel at its first launch, and not for two threads at once
        self._launching = threading.RLock()
        self._copying = {True: deque[Event](), False: deque[Event]()}  # keeps the ends of copies whose event is dropped
        self._apart: Event | None = None  # the last copy to the host on a stream of its own
        self._unmarked: list[tuple[Tensor, Tensor]] = []  # ends of copies among the kernels, up to the next event
        self._thread = threading.local()

    def _launch(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function on the stream of kernels."""
        try:
            return self._call_on(self._stream, function, *arguments, **options)
        finally:
            with self._marking:
                self._launched = self._marked = None

    @override
    def pinned(self, nbytes: int) -> Bytes:
        # PyTorch keeps memory that is freed, and hands it out again
        torch = self._torch
        memory: Bytes = self._call_on(
            None, torch.empty, nbytes, dtype=torch.uint8, device="cpu", pin_memory=True
        ).numpy()
        return memory

    @override
    def take(self, array: Array) -> Taken:
        if type(array).__name__ == "DTensor":
            raise TypeError("the array is a DTensor, of which this rank holds a part only: pass array.to_local()")
        self.follow()
        # CuPy and JAX let the current stream, here the device's own, wait for theirs. PyTorch lets it wait for the
        # current one, which would be itself: hence `follow`.
        tensor = self._launch(self._torch.from_dlpack, array)
        contiguous = tensor.is_contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        return Taken(
            name, tuple(tensor.shape), contiguous, tensor.data_ptr(), tensor.reshape(-1) if contiguous else None
        )

    @override
    def follow(self) -> None:
        self._call_on(None, self._follow)
        with self._marking:  # copies on streams of their own wait for the memory's writers, too
            self._launched = self._marked = None

    def _follow(self) -> None:
        if self._torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"a CUDA graph is being captured on {self.name}, and messages of MPI cannot be part of it: make the "
                "call outside of the capture"
            )
        self._stream.wait_stream(self._torch.cuda.current_stream(self._index))

    @override
    def zeros(self, n: int, dtype: str) -> Tensor:
        return self._launch(self._torch.zeros, n, dtype=getattr(self._torch, dtype), device=self.name)

    @override
    def run(self, work: Callable[[], object]) -> None:
        nvtx = self._torch.cuda.nvtx
        with self._launching:
            nvtx.range_push(name_of(work))
            try:
                self._call_on(self._stream, work)
            finally:
                with self._marking:
                    self._launched = self._marked = None
                nvtx.range_pop()

    def _behind_kernels(self) -> Any:
        """Return an event behind all kernels and short copies so far, and no long copy since the last of them."""
        with self._marking:
            if self._launched is None:
                self._launched = self._stream.record_event()
            return self._launched

    @override
    def copy(self, source: Array, target: Array) -> Testable:
        torch, to_host = self._torch, isinstance(target, np.ndarray)
        if to_host:
            from_, to = source.view(torch.uint8), torch.from_numpy(target.view(np.uint8))
        else:
            from_, to = torch.from_numpy(source.view(np.uint8)), target.view(torch.uint8)
        if (target if to_host else source).nbytes <= SHORT_BYTES and not (to_host and self._copies_apart()):
            self._call_on(self._stream, to.copy_, from_, non_blocking=True)
            with self._marking:
                self._unmarked.append((from_, to))
                self._launched = self._marked = None
            if to_host:
                return Event(self.done().Test)
            return self.done() if len(self._unmarked) > MOST_UNMARKED else CopyInTurn(self)
        copies = self._to_host if to_host else self._to_device
        event = self._call_on(copies, self._copy_apart, copies, from_, to)
        if to_host:
            self._apart = self._kept(
                Event(partial(self._call_on, None, event.query), (from_, to)), self._copying[to_host]
            )
            return self._apart
        self._call_on(None, self._stream.wait_event, event)
        with self._marking:
            self._marked = None
        return self._kept(QueuedEvent(self, event, (from_, to)), self._copying[to_host])

    def _copy_apart(self, copies: Any, from_: Tensor, to: Tensor) -> Any:
        copies.wait_event(self._behind_kernels())
        to.copy_(from_, non_blocking=True)
        return copies.record_event()

    def _copies_apart(self) -> bool:
        """Return True if a copy to the host is under way on its own stream, which later ones must follow."""
        apart = self._apart
        return apart is not None and not apart.Test()

    def _kept(self, event: _Event, earlier: deque[Event]) -> _Event:
        """Hold the ends of a copy until it is done: PyTorch would hand out their memory to a kernel or copy before."""
        with self._marking:
            while earlier and earlier[0].Test():
                earlier.popleft()
            earlier.append(event)
        return event

    @override
    def use(self) -> None:
        self._torch.cuda.set_device(self._index)
        if not getattr(self._thread, "is_relaxed", False):
            self._thread.is_relaxed = True
            relax_capture(bool(self._torch.version.hip))

    @override
    def done(self) -> Queued:
        with self._marking:
            marked = self._marked
            if marked is None:
                ends, self._unmarked = self._unmarked, []  # first: the event must be behind all of them
                marked = self._marked = QueuedEvent(self, self._call_on(None, self._stream.record_event), ends)
                if ends:
                    self._kept(marked, self._copying[False])
        return marked


def with_current(torch: ModuleType, index: int) -> Callable[..., Any]:
    """Return a function that calls another one while a GPU, and a stream of it or None, are current in the thread.

    PyTorch's contexts run 20 functions in Python for that, which takes longer than a launch. They serve releases that
    lack the functions of C that they call.
    """
    names = "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice", "_cuda_getCurrentStream", "_cuda_setStream"
    calls = [getattr(torch._C, name, None) for name in names]
    if None in calls:

        def call_in_contexts(stream: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with torch.cuda.device(index), nullcontext() if stream is None else torch.cuda.stream(stream):
                return function(*arguments, **options)

        return call_in_contexts
    exchange, restore, current, choose = cast(list[Callable[..., Any]], calls)

    def call(stream: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        gpu = exchange(index)  # first: to choose a stream of another GPU than the current one would leave that current
        try:
            if stream is None:
                return function(*arguments, **options)
            before = current(index)
            choose(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
            try:
                return function(*arguments, **options)
            finally:
                choose(*before)
        finally:
            restore(gpu)

    return call


def name_of(work: Callable[[], object]) -> str:
    """Return the name of a piece of work in profiles."""
    while isinstance(work, partial):
        work = work.func
    return f"mpicomp {getattr(work, '__name__', type(work).__name__).strip('_')}"


def relax_capture(hip: bool) -> None:
    """Let the calling thread query events while another thread captures a graph, which would fail otherwise.

    PyTorch captures in a mode in which calls of all threads count that have not been exempted.
    """
    library, function = (
        ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode")
        if hip
        else ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode")
    )
    with suppress(OSError, AttributeError):  # no such library: there is no graph either
        getattr(ctypes.CDLL(library), function)(ctypes.byref(ctypes.c_int(RELAXED)))


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
