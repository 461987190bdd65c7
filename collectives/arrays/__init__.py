"""Arrays of any library, in the memory of the host or of a device.

An array on a device travels through pinned memory of the host. It is copied there on a stream of its own, after the
work that makes the array, and copied back when its call has the result. The thread that drives the call polls events
meanwhile and waits for no device, so that other calls go on. The call ends when the copy back has ended, so every
stream sees the result; or, where the caller names a stream, once the copy is queued and this stream waits for it.

Arrays of PyTorch, CuPy and JAX are taken by DLPack. PyTorch makes the copies; it is imported with the first such array.
"""

from __future__ import annotations

from collectives.arrays.device import HOST_DEVICE, Device, DeviceStream, HostDevice, Queued, Taken
from collectives.arrays.device_lookup import CUDA, MAKERS, device_at, named
from collectives.arrays.staging import Landed, Place, Staging, after_copy, wait
from collectives.arrays.torch_device import TorchDevice
from collectives.arrays.torch_events import require_stream

__all__ = [
    "CUDA",
    "HOST_DEVICE",
    "MAKERS",
    "Device",
    "DeviceStream",
    "HostDevice",
    "Landed",
    "Place",
    "Queued",
    "Staging",
    "Taken",
    "TorchDevice",
    "after_copy",
    "device_at",
    "named",
    "require_stream",
    "wait",
]
