"""Work of a GPU that is under way: events, handles of copies and kernels, and streams that wait for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from collectives.annotations import Testable, override
from collectives.arrays.device import DeviceStream, Queued

if TYPE_CHECKING:
    from collectives.arrays.torch_device import TorchDevice


class Event(Testable):
    """Work of a device that is under way, until `done()` returns True; `ends` are kept alive until then."""

    __slots__ = ("_done", "_ends")

    def __init__(self, done: Callable[[], bool], ends: object = None) -> None:
        self._done: Callable[[], bool] | None = done
        self._ends = ends

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        done = self._done  # which another thread may set to None
        if done is not None and not done():
            return False
        self._done = self._ends = None
        return True


class QueuedEvent(Event, Queued):
    """Kernels, or copies to a device, up to an event."""

    __slots__ = ("_call_on", "_event", "device")

    def __init__(self, device: TorchDevice, event: Any, ends: object = None) -> None:
        # not by `super()`: as often as events are recorded, a call counts
        self._done, self._ends = partial(device._call_on, None, event.query), ends
        self.device, self._call_on, self._event = device, device._call_on, event

    @override
    def block(self, stream: DeviceStream) -> None:
        self._call_on(None, stream.wait_event, self._event)


class CopyInTurn(Queued):
    """Copy to a device among its kernels: an event is recorded once a caller needs one."""

    __slots__ = ("_done", "_queued", "device")

    def __init__(self, device: TorchDevice) -> None:
        self.device, self._done = device, device.done
        self._queued: Queued | None = None

    def _recorded(self) -> Queued:
        queued = self._queued
        if queued is None:
            self._queued = queued = self._done()
        return queued

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        return self._recorded().Test()

    @override
    def block(self, stream: DeviceStream) -> None:
        self._recorded().block(stream)


def require_stream(stream: object) -> DeviceStream:
    """Return a stream that a result can be handed to.

    Raises
    ------
    TypeError
        It is no stream of PyTorch.
    ValueError
        It captures a CUDA graph, which cannot wait for work outside of the graph.
    """
    if not callable(getattr(stream, "wait_event", None)):
        raise TypeError(
            f"stream is {stream!r}: pass a stream of PyTorch, such as torch.cuda.current_stream(); for one of another "
            "library, torch.cuda.ExternalStream(its address)"
        )
    taken: Any = stream
    import torch

    if isinstance(taken, torch.cuda.Stream):
        if _is_current(torch, taken):
            captures = torch.cuda.is_current_stream_capturing()
        else:
            with torch.cuda.stream(taken):
                captures = torch.cuda.is_current_stream_capturing()
        if captures:
            raise ValueError("stream captures a CUDA graph: wait for the call before or after the capture")
    checked: DeviceStream = taken
    return checked


def _is_current(torch: Any, stream: Any) -> bool:
    """Return True for the current stream of the current GPU, on which optimizers use their results."""
    number_of_current = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    index = getattr(stream, "device_index", None)
    return bool(
        number_of_current is not None
        and index == torch.cuda.current_device()
        and number_of_current(index) == stream.cuda_stream
    )
