"""Activities of a GPU and their times, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TO_HOST = ("Memcpy DtoH", "CopyDeviceToHost")
TO_DEVICE = ("Memcpy HtoD", "CopyHostToDevice")
"""How names of copies begin, on NVIDIA's and on AMD's GPUs."""


class Activity(NamedTuple):
    """A kernel or a copy: its stream's number, and when it ran, in seconds."""

    name: str
    stream: int
    start_s: float
    end_s: float

    @property
    def crosses(self) -> bool:
        """Flag: the activity is a copy between the host and the device."""
        return self.name.startswith(TO_HOST + TO_DEVICE)


def record(call: Callable[[], object], trace: Path | None = None) -> list[Activity]:
    """All that this process has the GPU do during a call, and until it is done; `trace`: a file for chrome://tracing."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(trace))
    return activities(found.events())


def activities(events: Iterable[Any]) -> list[Activity]:
    """Those of a GPU among events of the profiler; names that a program gives to stretches of time are left out."""
    from torch._C._autograd import DeviceType

    return [
        Activity(one.name, one.device_resource_id, 1e-6 * one.time_range.start, 1e-6 * one.time_range.end)
        for one in events
        if one.device_type == DeviceType.CUDA and not one.is_user_annotation
    ]


def busy(of: Iterable[Activity]) -> float:
    """Seconds in which at least one of them was under way."""
    total, until = 0.0, float("-inf")
    for one in sorted(of, key=lambda one: one.start_s):
        total += max(0.0, one.end_s - max(one.start_s, until))
        until = max(until, one.end_s)
    return total


def hidden_share(copies: Sequence[Activity], kernels: Sequence[Activity]) -> float | None:
    """Return the share of the copies' time in which kernels ran as well; None: there were no copies."""
    copying = busy(copies)
    # (copies + kernels - both) / copies, of which each is the time in which at least one of these was under way
    return (copying + busy(kernels) - busy([*copies, *kernels])) / copying if copying else None
