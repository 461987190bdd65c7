"""Arrays in the memory of a device: they travel through pinned memory of the host.

An array is copied there on a stream of its own, behind whoever makes the array, and copied back when its call has the
result. The thread that drives the call polls events in the meantime and waits for no device, so that other
calls go on. The call ends when the copy back has ended, and so every stream sees the result.

Arrays of torch, CuPy and JAX are taken by DLPack. The copies are made with PyTorch, which is imported with the first
such array.
"""

from __future__ import annotations

from collectives.devices.device import Device, Taken
from collectives.devices.finding import CPU, CUDA, HOST, HOST_DEVICE, MAKERS, PINNED, ROCM, ROCM_PINNED, named, of
from collectives.devices.host_device import HostDevice
from collectives.devices.landing import Landed, after_copy, wait
from collectives.devices.place import Place, Staging
from collectives.devices.torch_device import TorchDevice

__all__ = [
    "CPU",
    "CUDA",
    "HOST",
    "HOST_DEVICE",
    "MAKERS",
    "PINNED",
    "ROCM",
    "ROCM_PINNED",
    "Device",
    "HostDevice",
    "Landed",
    "Place",
    "Staging",
    "Taken",
    "TorchDevice",
    "after_copy",
    "named",
    "of",
    "wait",
]
