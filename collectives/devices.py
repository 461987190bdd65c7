"""Arrays in the memory of a device: they travel through pinned memory of the host.

An array is copied there on a stream of its own, behind whoever makes the array, and copied back when its call has the
result. The thread that drives the call polls events in the meantime and waits for no device, so that other
calls go on. The call ends when the copy back has ended, and so every stream sees the result.

Arrays of torch, CuPy and JAX are taken by DLPack. The copies are made with PyTorch, which is imported with the first
such array.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.testable import Testable

CPU, CUDA, PINNED, ROCM, ROCM_PINNED = 1, 2, 3, 10, 11  # kinds of devices, by their numbers in DLPack
HOST = (CPU, PINNED, ROCM_PINNED)
Bytes = NDArray[np.uint8]


class Taken(NamedTuple):
    """An array on a device, as its library describes it.

    Attributes
    ----------
    dtype : str
        Element type.
    shape : tuple of int
    contiguous : bool
        In C order.
    address : int
        Of its first byte on the device.
    vector : tensor, 1-D
        Its elements, as PyTorch has them; keeps the array alive. None where it is not contiguous.
    """

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    address: int
    vector: Any


class Device(Protocol):
    """One device, as far as calls need it. It does later what it is given to do.

    Kernels follow upon kernels and upon copies to the device. Copies follow upon copies, and upon the kernels before.
    Kernels do not wait for copies to the host, which are made while others compute.

    Attributes
    ----------
    name : str
        As in ``"cuda:0"``, for messages.
    """

    name: str

    def pinned(self, nbytes: int) -> Bytes:
        """Memory of the host that the device can copy from and to while the host goes on."""
        ...

    def zeros(self, n: int, dtype: str) -> Any:
        """A vector on the device, as PyTorch has it."""
        ...

    def take(self, array: Any) -> Taken:
        """An array of any library, without a copy; what begins from now on waits for whoever makes it."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Have kernels launched."""
        ...

    def copy(self, source: Any, target: Any) -> Testable:
        """Copy a vector, of which either end is the host's; tells when that, and every copy before, is done."""
        ...

    def done(self) -> Testable:
        """Tells when all kernels that were launched before are done."""
        ...


class Place:
    """Where an array is.

    Parameters
    ----------
    device : Device
    taken : Taken
    nbytes : int
    """

    def __init__(self, device: Device, taken: Taken, nbytes: int) -> None:
        self.device = device
        self._span = range(taken.address, taken.address + nbytes)

    def is_same(self, other: Place) -> bool:
        """Whether two arrays are in the same place."""
        return (self.device.name, self._span) == (other.device.name, other._span)

    def overlaps(self, other: Place) -> bool:
        """Whether two arrays share memory."""
        first, second = self._span, other._span
        same = self.device.name == other.device.name
        return same and first.start < second.stop and second.start < first.stop


class Staging(Place):
    """An array on a device, and the memory of the host that it travels through.

    Parameters
    ----------
    device : Device
    taken : Taken
        Contiguous.
    nbytes : int

    Attributes
    ----------
    host : uint8[nbytes]
    """

    def __init__(self, device: Device, taken: Taken, nbytes: int) -> None:
        super().__init__(device, taken, nbytes)
        self._vector, self.host = taken.vector, device.pinned(nbytes)

    def fetch(self) -> Testable:
        """Begin to overwrite the host's memory with the array."""
        return self.device.copy(self._vector, self.host)

    def deliver(self) -> Testable:
        """Begin to overwrite the array with the host's memory."""
        return self.device.copy(self.host, self._vector)


def of(kind: int, index: int) -> Device:
    """The device that DLPack gives these numbers.

    Raises
    ------
    ValueError
        There is no way to reach it.
    """
    make = MAKERS.get(kind)
    if make is None:
        raise ValueError(f"the array is on device {(kind, index)}, which cannot be reached: pass a copy in CPU memory")
    return make(index)


def named(name: str) -> Device:
    """The device of a name such as ``"cuda"``, the current one, or ``"cuda:1"``, as PyTorch names NVIDIA's and AMD's.

    Raises
    ------
    ValueError
        There is none of this name.
    """
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ValueError(f"there is no device {name!r}: write 'cpu', 'cuda' or 'cuda:1'")
    return of(CUDA, int(index) if index else _current_index())


class TorchDevice:
    """A GPU of NVIDIA or AMD, by PyTorch; see `Device`."""

    def __init__(self, torch: Any, index: int) -> None:
        self.name, self._torch = f"cuda:{index}", torch
        self._index = index
        self._stream, self._copies = torch.cuda.Stream(index), torch.cuda.Stream(index)

    def _on_stream(self) -> AbstractContextManager[None]:
        return self._torch.cuda.stream(self._stream)  # type: ignore[no-any-return]

    def pinned(self, nbytes: int) -> Bytes:
        """See `Device`; PyTorch keeps memory that is freed, and hands it out again."""
        memory: Bytes = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    def take(self, array: Any) -> Taken:
        """See `Device`.

        CuPy and JAX let the current stream, here the device's own, wait for theirs. PyTorch lets it wait for the
        current one, which would be itself.
        """
        self._stream.wait_stream(self._torch.cuda.current_stream(self._index))
        with self._on_stream():
            tensor = self._torch.from_dlpack(array)
        contiguous = tensor.is_contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        return Taken(
            name, tuple(tensor.shape), contiguous, tensor.data_ptr(), tensor.reshape(-1) if contiguous else None
        )

    def zeros(self, n: int, dtype: str) -> Any:
        """See `Device`."""
        with self._on_stream():
            return self._torch.zeros(n, dtype=getattr(self._torch, dtype), device=self.name)

    def run(self, work: Callable[[], object]) -> None:
        """See `Device`."""
        with self._on_stream():
            work()

    def copy(self, source: Any, target: Any) -> Testable:
        """See `Device`."""
        from_, to = self._bytes(source), self._bytes(target)
        self._copies.wait_stream(self._stream)
        with self._torch.cuda.stream(self._copies):
            to.copy_(from_, non_blocking=True)
        event = self._copies.record_event()
        if not isinstance(target, np.ndarray):
            self._stream.wait_event(event)
        return Event(event.query, (from_, to))

    def done(self) -> Testable:
        """See `Device`."""
        return Event(self._stream.record_event().query)

    def _bytes(self, vector: Any) -> Any:
        if isinstance(vector, np.ndarray):
            return self._torch.from_numpy(vector.view(np.uint8))
        return vector.view(self._torch.uint8)


class Event:
    """What a device has yet to do; see `Testable`.

    Parameters
    ----------
    done : callable
        Whether it is done.
    ends : object
        Kept alive until then.
    """

    __slots__ = ("_done", "_ends")

    def __init__(self, done: Callable[[], bool], ends: object = None) -> None:
        self._done, self._ends = done, ends

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """See `Testable`."""
        if not self._done():
            return False
        self._ends = None
        return True


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
    """Of the GPU that PyTorch means by "cuda"; 0 where it finds none."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


MAKERS: dict[int, Callable[[int], Device]] = {CUDA: _torch_device, ROCM: _torch_device}
"""What makes a device of each kind that can be reached."""
