"""Devices by their numbers in DLPack, and by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

from collectives.arrays.device import HOST_DEVICE, Device
from collectives.arrays.torch_device import TorchDevice

CPU, CUDA, PINNED, ROCM, ROCM_PINNED = 1, 2, 3, 10, 11  # kinds of devices, by their numbers in DLPack
HOST = (CPU, PINNED, ROCM_PINNED)
_making = threading.Lock()  # of devices
NAMES = {"cuda": CUDA}
"""Kinds of devices, by their names in PyTorch."""


def device_at(kind: int, index: int) -> Device:
    """Return the device that has these numbers in DLPack.

    Raises
    ------
    ValueError
        There is no way to reach it.
    """
    make = MAKERS.get(kind)
    if make is None:
        raise ValueError(f"the array is on device {(kind, index)}, which cannot be reached: pass a copy in CPU memory")
    with _making:  # a cache alone would make two devices for two threads
        return make(index)


def named(name: str) -> Device:
    """Return the device of a name of PyTorch: ``"cpu"``, ``"cuda"`` (the current one) or ``"cuda:1"``.

    AMD's devices have NVIDIA's names there.

    Raises
    ------
    ValueError
        No device has this name.
    """
    if name == "cpu":
        return HOST_DEVICE
    kind, _, index = name.partition(":")
    if kind not in NAMES or not (index or "0").isdecimal():
        raise ValueError(f"there is no device {name!r}: write 'cpu', 'cuda' or 'cuda:1'")
    return device_at(NAMES[kind], int(index) if index else _current_index())


@cache
def _torch_device(index: int) -> TorchDevice:
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"the array is on GPU {index}, which takes PyTorch: install it, or pass CPU memory") from error
    if not torch.cuda.is_available():
        raise ValueError(f"the array is on GPU {index}, but PyTorch finds none: install its build for the GPU")
    if index >= torch.cuda.device_count():
        raise ValueError(f"there is no GPU {index}: PyTorch finds {torch.cuda.device_count()}")
    return TorchDevice(torch, index)


def _current_index() -> int:
    """Return the index of the GPU that PyTorch calls "cuda"; 0 where it finds no GPU."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


MAKERS: dict[int, Callable[[int], Device]] = {CUDA: _torch_device, ROCM: _torch_device}
"""Functions that make a device, by kind."""
