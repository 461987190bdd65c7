"""PyTorch's devices and profilers: reachable tensors, encoding, streams of gradients, events of our calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, lru_cache, partial

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.futures import Future
from torch.nn.parameter import is_lazy

from collectives.arrays import named
from mpicomp import kernels
from mpicomp.algorithms import Algorithm

_log = logging.getLogger("mpicomp")


def require_reachable(name: str, tensor: Tensor) -> None:
    """Raise ValueError, with the tensor's name, unless it has values in host memory or on a GPU that can be reached."""
    if is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape and no values yet, since its module is lazy; run a forward first, such as "
            "model(inputs), on every rank"
        )
    if type(tensor).__name__ == "DTensor":
        raise ValueError(
            f"{name} is a DTensor, of which this rank holds a part only; pass an optimizer of plain tensors, such as "
            "parameter.to_local()"
        )
    if tensor.device.type == "cpu":
        return
    if tensor.is_meta:
        raise ValueError(
            f"{name} lives on meta, which cannot be reached (it has a shape and no values); move it to the CPU or to a "
            "GPU by module.to_empty(device='cpu'), and initialize it there or load its state"
        )
    try:
        named(str(tensor.device))
    except ValueError as error:
        raise ValueError(
            f"{name} lives on {tensor.device}, which cannot be reached ({error}); move it to the CPU or to a GPU"
        ) from error


def encoding_device(algorithm: Algorithm, dtype: str, device: torch.device) -> str:
    """Return the device on which a method encodes vectors of a device, as `Algorithm.start` takes it."""
    on_device = device.type != "cpu" and algorithm.encodes_on_devices(dtype) and _has_kernels()
    return str(device) if on_device else "cpu"


@cache
def _has_kernels() -> bool:
    try:
        kernels.of("cuda")
    except ImportError as error:
        _log.warning("vectors on GPUs are encoded on the CPU: %s", error)
        return False
    return True


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if tensors, also sparse ones, hold neither NaN nor infinity; waits once for each device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor._values() if tensor.is_sparse else tensor
        flags.setdefault(values.device, []).append(torch.isfinite(values).all())
    return all(bool(torch.stack(found).all()) for found in flags.values())


def current_stream(tensor: Tensor) -> torch.cuda.Stream | None:
    """Return the stream on which a tensor is made now; None: the host makes it."""
    if not tensor.is_cuda:
        return None
    index = tensor.get_device()
    return stream_at(index, torch._C._cuda_getCurrentRawStream(index))


@lru_cache
def stream_at(index: int, address: int) -> torch.cuda.Stream:
    """Return a GPU's current stream, which has this address."""
    # streams by their address, since hooks of gradients need one each, and PyTorch makes an object for each question
    return torch.cuda.current_stream(index)


def wait_for(streams: Iterable[torch.cuda.Stream | None]) -> None:
    """Let each device's current stream wait for these streams; None is passed over."""
    for stream in streams:
        if stream is None:
            continue
        here = torch.cuda.current_stream(stream.device)
        if here != stream:
            here.wait_stream(stream)


def call_after_backward(function: Callable[[], None]) -> bool:
    """Have autograd call a function at the end of the backward that runs now; return False outside of backward."""
    with suppress(RuntimeError):
        torch.autograd.Variable._execution_engine.queue_callback(function)
        return True
    return False


def devices_of(tensors: Iterable[Tensor]) -> list[int | str | torch.device]:
    """Return the devices of tensors, as a future of theirs needs them; the CPU is left out."""
    return [*sorted({one.device for one in tensors if one.device.type != "cpu"}, key=str)]


# Profilers ------------------------------------------------------------------------------------------------------------


def begin_event(name: str) -> Callable[[], None] | None:
    """Begin an event, which profilers show under a name such as "mpicomp:all_reduce", if one runs in this thread.

    Returns
    -------
    callable or None
        Ends the event, in whichever thread; None: no profiler runs.
    """
    if not torch._C._autograd._profiler_enabled():
        return None
    event = record_function(f"mpicomp:{name}")
    enter: Callable[[], object] = event.__enter__
    enter()
    ended: Future[None] = Future()
    event._call_end_callbacks_on_future(ended)  # which lets it end in another thread, where the call ends
    return partial(ended.set_result, None)
