"""Devices, as far as calls need them; and the host as one of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.annotations import AnyArray, Array, Bytes, Tensor, Testable, override
from collectives.arrays.elements import aligned_empty, dtype_name, storage


class Taken(NamedTuple):
    """An array on a device, as its library describes it."""

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool  # in C order
    address: int  # of its first byte on the device
    # 1-D, a tensor of PyTorch (on the host, an array of NumPy), which keeps the array alive; None: not contiguous
    vector: Tensor


class DeviceStream(Protocol):
    """Stream of a device, as PyTorch has them."""

    def wait_event(self, event: Any) -> None:
        """Let work that is submitted from now on wait for an event."""
        ...


class Queued(Testable):
    """Kernels, or copies to a device: work without an effect on the host, for which a stream may wait instead."""

    __slots__ = ()

    device: Device

    @abstractmethod
    def block(self, stream: DeviceStream) -> None:
        """Let a stream wait for this work."""


class Device(Protocol):
    """A device, as far as calls need it. Work may be done later than its call; `HostDevice` does it at once.

    Kernels run in the order of their launches, and after copies to the device that began before. They do not wait for
    copies to the host, which are made while kernels compute. A copy follows kernels that were launched before and
    earlier copies in its direction; copies to the host and copies to the device do not wait for each other. So code
    that overwrites a vector while it is copied, or copies one back while it is on its way, waits for that copy first.

    Attributes
    ----------
    name : str
        As in ``"cuda:0"``, for messages.
    """

    name: str

    def pinned(self, nbytes: int) -> Bytes:
        """Return memory of the host that the device can copy from and to while the host goes on."""
        ...

    def zeros(self, n: int, dtype: str) -> Tensor:
        """Return a vector on the device, as a tensor of PyTorch."""
        ...

    def take(self, array: Array) -> Taken:
        """View an array of any library without a copy. Later work waits for the stream that produces the array."""
        ...

    def follow(self) -> None:
        """Let later work wait for the calling thread's stream, on which it makes an array that was taken before."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Call `work`, which launches kernels."""
        ...

    def copy(self, source: Array, target: Array) -> Testable | None:
        """Copy a vector byte by byte; one of the two is the host's.

        Returns
        -------
        Testable or None
            Done once this copy and all earlier ones in its direction are; None: they are done already.
        """
        ...

    def use(self) -> None:
        """Make the device the calling thread's current one, for libraries that work with the current device."""
        ...

    def done(self) -> Queued | None:
        """Return a handle that is done once all kernels launched so far are; None: they are done already.

        Copies to the device that began before are done then, too.
        """
        ...


class HostDevice(Device):
    """The CPU and its memory, for code that serves both devices and the host.

    Vectors are arrays of NumPy; those of bfloat16 are uint16. `copy` and `done` return None, which any caller of a
    device takes for "finished already", so the host pays for no polling: a payload's `encode`, `merge` and `finish` may
    return it, `collectives.progress.polling.done` yields nothing for it, and `wait` returns at once.

    Code that keeps a vector and its copy on the host, as a device needs, can let both be one array here: `copy` of a
    vector onto its own memory does nothing. Code that overwrites one end before it has used the other needs two arrays.

    `run` calls its work in the calling thread without a lock: two threads may run work at once, as with plain calls.

    Examples
    --------
    >>> from collectives.arrays import HostDevice
    >>> host = HostDevice()
    >>> vector = host.zeros(3, "float32")
    >>> host.run(lambda: vector.fill(2))
    >>> landing = host.pinned(vector.nbytes).view("float32")
    >>> host.copy(vector, landing), landing.tolist()
    (None, [2.0, 2.0, 2.0])
    """

    name = "cpu"

    @override
    def pinned(self, nbytes: int) -> Bytes:
        return aligned_empty(nbytes, np.uint8)

    @override
    def zeros(self, n: int, dtype: str) -> AnyArray:
        return np.zeros(n, storage(dtype))

    @override
    def take(self, array: Array) -> Taken:
        values = array if isinstance(array, np.ndarray) else np.from_dlpack(array)
        contiguous, dtype = values.flags.c_contiguous, dtype_name(values.dtype)
        vector = values.reshape(-1).view(storage(dtype)) if contiguous else None
        return Taken(dtype, values.shape, contiguous, values.ctypes.data, vector)

    @override
    def follow(self) -> None:
        pass

    @override
    def run(self, work: Callable[[], object]) -> None:
        work()

    @override
    def copy(self, source: AnyArray, target: AnyArray) -> None:
        if source.ctypes.data != target.ctypes.data:
            target.view(np.uint8)[:] = source.view(np.uint8)

    @override
    def use(self) -> None:
        pass

    @override
    def done(self) -> None:
        pass


HOST_DEVICE = HostDevice()
"""The host as a device, which all code shares."""
