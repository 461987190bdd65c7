"""Arrays of any library as flat NumPy vectors on the same memory.

The vector of an array on a device is memory of the host, which `collectives.arrays.staging` copies it to and back.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from collectives.annotations import AnyArray, Array, Bytes, Tensor
from collectives.arrays.device import Device, Taken
from collectives.arrays.device_lookup import HOST, device_at
from collectives.arrays.dlpack import device_numbers, exported, require_values
from collectives.arrays.elements import COPIED, FLOATS, dtype_name, storage
from collectives.arrays.staging import Place, Staging


class Flat(NamedTuple):
    """A vector on the memory of an array."""

    # 1-D contiguous, uint16 for bfloat16; keeps the memory alive. Of an array on a device that does not cross, a
    # stand-in of the same length and type that holds no values.
    values: AnyArray
    dtype: str  # of the elements
    shape: tuple[int, ...]  # of the array
    place: Place | None = None  # of an array on a device: a `Staging` copies between `values` and the array

    @property
    def staging(self) -> Staging | None:
        """Staging buffer between `values` and an array on a device."""
        return self.place if isinstance(self.place, Staging) else None

    def overlaps(self, other: Flat) -> bool:
        """Return True if the two arrays share memory, on any device."""
        if self.place is None and other.place is None:
            return bool(np.may_share_memory(self.values, other.values))
        return self.place is not None and other.place is not None and self.place.overlaps(other.place)

    def begins_with(self, other: Flat) -> bool:
        """Return True if the two arrays, which share memory, begin in the same place."""
        if self.place is None or other.place is None:
            return self.values.ctypes.data == other.values.ctypes.data
        return self.place.is_same(other.place)


def flat(array: Array, allowed: tuple[str, ...] = FLOATS, crosses: bool = True, verb: str = "reduce") -> Flat:
    """View an array as a vector, without copying.

    Parameters
    ----------
    array : ndarray, or anything with ``__dlpack__``
        Contiguous in C order.
    allowed : tuple of str
        Element types to accept.
    crosses : bool
        Allocate memory of the host for an array on a device; False: `crossing` does so later.
    verb : str
        The caller's use of the array, for errors.

    Raises
    ------
    TypeError
        Not an array, or of another element type, or it requires grad, or has a mask.
    ValueError
        Not contiguous, or no plain memory, or on a device that cannot be reached.
    MemoryError
        Pinned memory cannot be allocated.
    """
    if isinstance(array, np.ndarray):
        if type(array) is not np.ndarray:
            array = _memory_of(array)
        name = dtype_name(array.dtype)
        if name not in allowed or not array.flags.c_contiguous:
            _check(name, allowed, array.flags.c_contiguous, f"strides {array.strides} bytes", verb)
        values = array if array.ndim == 1 else array.reshape(-1)
        return Flat(values.view(np.uint16) if name == "bfloat16" else values, name, array.shape)
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"cannot {verb} {type(array).__name__}: pass a NumPy array or a tensor that supports DLPack")
    require_values(array)
    kind, index = device_numbers(array)
    if kind not in HOST:
        vector = _staged(device_at(kind, index), array, allowed, verb)
        return crossing(vector) if crosses else vector
    found = exported(array)
    _check(found.dtype, allowed, found.is_contiguous, f"strides {found.strides}", verb)
    return Flat(found.vector(), found.dtype, found.shape)


def _memory_of(array: AnyArray) -> AnyArray:
    """Return the array as one of NumPy's own class, which a matrix or a file in memory is as well."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("the array is masked, and its mask would be lost: pass array.filled(0), or another value")
    return array.view(np.ndarray)


def as_behaved(vector: AnyArray) -> AnyArray:
    """Return a vector that is only read as an aligned array without the read-only flag; unaligned ones are copied."""
    if vector.flags.behaved or not vector.size:
        return vector
    if not vector.flags.aligned:
        return vector.copy()
    memory: Any = (ctypes.c_uint8 * vector.nbytes).from_address(vector.ctypes.data)
    memory.owner = vector
    return np.frombuffer(memory, vector.dtype)


def is_read_only(vector: Flat, array: Array) -> bool:
    """Return True if the array that a vector was taken from cannot be written."""
    if vector.place is None:
        return not vector.values.flags.writeable
    jax = sys.modules.get("jax")  # the one library on GPUs whose arrays never change
    return jax is not None and isinstance(array, jax.Array)


def on_device(device: Device, array: Array) -> Flat:
    """View an array on this device as a vector there, a tensor of PyTorch.

    Raises as `flat` does, and ValueError for an array elsewhere.
    """
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{type(array).__name__} is no array on {device.name}: pass a tensor there")
    require_values(array)
    kind, index = device_numbers(array)
    if kind in HOST or device_at(kind, index) is not device:
        raise ValueError(f"the array is on device {(kind, index)}, not on {device.name}: pass a copy there")
    taken = _taken(device, array, FLOATS)
    nbytes = math.prod(taken.shape) * storage(taken.dtype).itemsize
    return Flat(taken.vector, taken.dtype, taken.shape, Place(device, taken, nbytes))


def held(device: Device, vector: Tensor, dtype: str, host: Bytes) -> Flat:
    """View a tensor on a device as a vector of element type `dtype`, for which `host` is the memory it crosses to.

    The tensor may be the float32 copy of a 16-bit vector.
    """
    n, name = len(vector), str(vector.dtype).removeprefix("torch.")
    staging = Staging(device, Taken(name, (n,), True, vector.data_ptr(), vector), host.nbytes)
    staging.host = host
    return Flat(_stand_in(n, storage(name)), dtype, (n,), staging)


def crossing(vector: Flat) -> Flat:
    """Return the vector, with pinned memory if it is an array on a device; raises MemoryError if that fails."""
    staging = vector.staging
    if staging is None:
        return vector
    try:
        host = staging.pin()
    except RuntimeError as error:
        problem = f"there is no pinned memory to take {vector.values.size} elements from {staging.device.name} to"
        raise MemoryError(f"{problem} ({error}); free memory of the host, or pass an array that is there") from error
    return vector._replace(values=host.view(vector.values.dtype))


def _staged(device: Device, array: Array, allowed: tuple[str, ...], verb: str) -> Flat:
    """Return the vector of an array on a device, which does not cross yet."""
    taken = _taken(device, array, allowed, verb)
    stored, n = storage(taken.dtype), math.prod(taken.shape)
    if not n:
        return Flat(np.empty(0, stored), taken.dtype, taken.shape)
    return Flat(_stand_in(n, stored), taken.dtype, taken.shape, Staging(device, taken, n * stored.itemsize))


def _stand_in(n: int, dtype: np.dtype[Any]) -> AnyArray:
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), (n,), (0,))


def _taken(device: Device, array: Array, allowed: tuple[str, ...], verb: str = "reduce") -> Taken:
    try:
        taken = device.take(array)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"the array on {device.name} cannot be used ({error}): pass a contiguous copy") from error
    _check(taken.dtype, allowed, taken.contiguous, f"on {device.name}", verb)
    return taken


def _check(name: str, allowed: tuple[str, ...], contiguous: bool, layout: str, verb: str) -> None:
    if name not in allowed:
        raise TypeError(f"cannot {verb} elements of type {name}: convert to one of {', '.join(allowed)}")
    if not contiguous:
        raise ValueError(f"the array is not contiguous ({layout}): pass a contiguous copy")


def empty_like(array: Array, shape: tuple[int, ...] | None = None) -> Array:
    """Return a new array of the same library and element type, and of the same shape unless another is given.

    Raises
    ------
    TypeError
        The library of the array exports memory by DLPack, but makes no other arrays, or none that can be written.
    MemoryError
    """
    shape = getattr(array, "shape", ()) if shape is None else shape
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    if hasattr(array, "new_empty"):
        try:
            return array.new_empty(shape)
        except RuntimeError as error:  # PyTorch's, where there is no memory
            raise MemoryError(str(error)) from error
    if hasattr(array, "__array_namespace__"):
        made = array.__array_namespace__().empty(shape, dtype=array.dtype, device=array.device)
        if not is_read_only(flat(made, COPIED, crosses=False), made):
            return made
        reason = "its kind cannot be written"
    else:
        reason = "it has no __array_namespace__"
    raise TypeError(
        f"no other {type(array).__name__} can be made for the result, as {reason}: "
        "pass out where the call takes it, or a NumPy array"
    )
