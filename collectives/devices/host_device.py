"""The host as a device: memory is ordinary memory, and calls return finished work."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray, Array, Bytes, override
from collectives.devices.device import Device, Taken

PAGE = 4096


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
        return np.zeros(n, np.uint16 if dtype == "bfloat16" else dtype)

    @override
    def take(self, array: Array) -> Taken:
        values = array if isinstance(array, np.ndarray) else np.from_dlpack(array)
        contiguous, is_bfloat16 = values.flags.c_contiguous, values.dtype.name == "bfloat16"
        vector = values.reshape(-1) if contiguous else None
        if vector is not None and is_bfloat16:
            vector = vector.view(np.uint16)
        return Taken(values.dtype.name, values.shape, contiguous, values.ctypes.data, vector)

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


def aligned_empty(n: int, dtype: DTypeLike, alignment: int = PAGE) -> AnyArray:
    """Return an uninitialized vector that begins at a multiple of `alignment` bytes, as buffers of messages should.

    memcpy, in MPI and in the kernel, is many times slower on some processors where the target's offset in its page is
    1 to 31 bytes more than the source's (seen on AMD Zen 3). A target that begins a page is
    safe, since vectors and pieces of them begin at multiples of at least 16 bytes.
    """
    nbytes = n * np.dtype(dtype).itemsize
    room = np.empty(nbytes + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    return room[start : start + nbytes].view(dtype)
