"""Tensors on devices: which can be reached, where their vectors are encoded, and streams on which gradients come."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from collectives.arrays import named
from mpicomp import kernels
from mpicomp.algorithms import Algorithm

_log = logging.getLogger("mpicomp")


def require_reachable(what: str, tensor: Tensor) -> None:
    """Raise ValueError, with `what` the tensor is, unless it lives in host memory or on a GPU that can be reached."""
    if tensor.device.type == "cpu":
        return
    if tensor.is_meta:
        raise ValueError(
            f"{what} lives on meta, which cannot be reached (it has a shape and no values); move it to the CPU or to a "
            "GPU by module.to_empty(device='cpu'), and initialize it there or load its state"
        )
    try:
        named(str(tensor.device))
    except ValueError as error:
        raise ValueError(
            f"{what} lives on {tensor.device}, which cannot be reached ({error}); move it to the CPU or to a GPU"
        ) from error


def encoding_device(algorithm: Algorithm, dtype: str, device: torch.device) -> str:
    """Where a method encodes vectors that lie on a device, as `Algorithm.start` takes it."""
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
    """Whether there is neither NaN nor infinity in tensors, sparse ones too; waits once for each device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor._values() if tensor.is_sparse else tensor
        flags.setdefault(values.device, []).append(torch.isfinite(values).all())
    return all(bool(torch.stack(found).all()) for found in flags.values())


def current_stream(tensor: Tensor) -> Any:
    """The stream on which a tensor is made now; None: the host makes it."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def wait_for(streams: Iterable[Any]) -> None:
    """Let what is made from now on wait for what these streams make, each on its device; None is passed over."""
    for stream in streams:
        if stream is None:
            continue
        here = torch.cuda.current_stream(stream.device)
        if here != stream:
            here.wait_stream(stream)


def devices_of(tensors: Iterable[Tensor]) -> list[int | str | torch.device]:
    """The devices of tensors, which a future of theirs must know; the CPU is left out."""
    return [*sorted({one.device for one in tensors if one.device.type != "cpu"}, key=str)]
