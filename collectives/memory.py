"""Arrays of any library as flat NumPy vectors on the same memory, through DLPack.

Of an array on a device the vector is memory of the host, which `collectives.devices` copies it to and back.

NumPy has no bfloat16, so vectors of it are uint16 with the element type named beside.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import devices
from collectives.devices.host_device import PAGE as PAGE
from collectives.devices.host_device import aligned_empty as aligned_empty

SIXTEEN_BIT = ("float16", "bfloat16")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64")
COPIED = (*FLOATS, *INTEGERS, "uint8", "bool", "int8", "int16", "uint16")  # what is only moved, not computed with
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class Flat(NamedTuple):
    """A vector on somebody's memory.

    Attributes
    ----------
    values : ndarray, 1-D contiguous
        uint16 where `dtype` is bfloat16. Keeps the memory alive. Of an array on a device that does not cross, something
        of the same length and type that holds no values.
    dtype : str
        Element type.
    shape : tuple of int
        Of the array it came from.
    place : Place or None
        Where the array is, if it is on a device: a `Staging` copies between `values` and the array.
    """

    values: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]
    place: devices.Place | None = None

    @property
    def staging(self) -> devices.Staging | None:
        """What copies between `values` and an array on a device."""
        return self.place if isinstance(self.place, devices.Staging) else None


class _Tensor(ctypes.Structure):
    """DLTensor of the DLPack specification, version 0."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of the DLPack specification, version 1, up to the tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_NOT_TO_BE_WRITTEN = 0b11  # flags: the memory is read-only, or a copy that the array will not see written
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype = ctypes.c_char_p
_name_of.argtypes = (ctypes.py_object,)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name of an element type; NumPy takes 10 us to make it up."""
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


def flat(array: Any, allowed: tuple[str, ...] = FLOATS, crosses: bool = True) -> Flat:
    """View an array as a vector, without copying.

    Parameters
    ----------
    array : ndarray, or anything with ``__dlpack__``
        Contiguous in C order.
    allowed : tuple of str
        Element types to accept.
    crosses : bool
        Take memory of the host for an array on a device; False: that is left to `crossing`.

    Raises
    ------
    TypeError
        Not an array, or of another element type, or it requires grad, or has a mask.
    ValueError
        Not contiguous, or no plain memory, or on a device that cannot be reached.
    MemoryError
        There is no pinned memory.
    """
    if isinstance(array, np.ndarray):
        if type(array) is not np.ndarray:
            array = _memory_of(array)
        name = dtype_name(array.dtype)
        if name not in allowed or not array.flags.c_contiguous:
            _check(name, allowed, array.flags.c_contiguous, f"strides {array.strides} bytes")
        values = array if array.ndim == 1 else array.reshape(-1)
        return Flat(values.view(np.uint16) if name == "bfloat16" else values, name, array.shape)
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"cannot reduce {type(array).__name__}: pass a NumPy array or a tensor that supports DLPack")
    _require_values(array)
    kind, number = _device_of(array)
    if kind not in devices.HOST:
        vector = _staged(devices.of(kind, number), array, allowed)
        return crossing(vector) if crosses else vector
    capsule = _exported(array)
    tensor, is_writable = _described(array, capsule)
    name = f"{_CODES[tensor.code]}{tensor.bits}" if tensor.code in _CODES else str(getattr(array, "dtype", "unknown"))
    if name == "bool8":
        name = "bool"  # as NumPy says
    if tensor.lanes != 1:
        name = f"{name}x{tensor.lanes}"
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    _check(name, allowed, strides is None or _contiguous(shape, strides), f"strides {strides}")
    storage = _storage(name)
    n = math.prod(shape)
    if not n:
        values = np.empty(0, storage)
    elif not tensor.data:
        raise ValueError(
            f"the {type(array).__name__} has no memory of its own, as it was freed or stands for another tensor: pass "
            "a dense tensor that holds the values"
        )
    else:
        memory = (ctypes.c_uint8 * (n * storage.itemsize)).from_address(tensor.data + tensor.byte_offset)
        memory.owner = array, capsule  # a reference to the vector keeps its memory
        values = np.frombuffer(memory, storage)
    if not is_writable:
        values.flags.writeable = False
    return Flat(values, name, shape)


def _memory_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array as one of NumPy's own class, which a matrix or a file in memory is as well."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("the array is masked, and its mask would be lost: pass array.filled(0), or another value")
    return array.view(np.ndarray)


def _require_values(array: Any) -> None:
    """Raise unless the memory of a tensor holds its values, and all that is to be known of them."""
    if getattr(array, "requires_grad", False):
        raise TypeError("the tensor requires grad, so reducing it would cut the graph: pass tensor.detach()")
    is_negated = getattr(array, "is_neg", None)  # of PyTorch alone; DLPack forgets it
    if is_negated is not None and is_negated():
        raise ValueError("the tensor is a negated view of its memory: pass tensor.resolve_neg()")


def _device_of(array: Any) -> tuple[int, int]:
    """Kind and number of the device that an array is on, as DLPack has them."""
    try:
        kind, number = array.__dlpack_device__()
        return int(kind), int(number)
    except Exception as error:
        raise _not_plain(array, error) from error


def _exported(array: Any) -> Any:
    """Capsule of DLPack."""
    try:
        try:
            return array.__dlpack__(max_version=(1, 0))
        except TypeError:  # a library from before version 1
            return array.__dlpack__()
    except Exception as error:
        raise _not_plain(array, error) from error


def _not_plain(array: Any, error: Exception) -> ValueError:
    """Return the error for an array that its own library does not export: sparse, conjugated, traced, ..."""
    if str(getattr(array, "device", "")) == "meta":
        cure = "make it where it has values, such as by module.to_empty(device='cpu') and an initialization"
        return ValueError(f"the tensor is on device meta, where it has a shape and no values: {cure}")
    told = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(f"the {type(array).__name__} is not plain memory ({told:.200}): pass a dense contiguous copy")


def _described(array: Any, capsule: Any) -> tuple[_Tensor, bool]:
    """Return the tensor that a capsule of DLPack describes, and whether it may be written."""
    if _name_of(capsule) == b"dltensor_versioned":
        versioned = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        return versioned.tensor, not versioned.flags & _NOT_TO_BE_WRITTEN
    return _Tensor.from_address(_pointer_of(capsule, b"dltensor")), not _is_immutable(array)


def _is_immutable(array: Any) -> bool:
    """Return True if NumPy sees the array as read-only; versions of DLPack before 1 have no flag for it."""
    try:
        if hasattr(array, "__array_interface__"):
            return bool(array.__array_interface__["data"][1])
        return hasattr(array, "__array__") and not np.asarray(array).flags.writeable
    except Exception:  # noqa: BLE001 - of any library, which does not let NumPy see it
        return False


def is_read_only(vector: Flat, array: Any) -> bool:
    """Return True if the array that a vector was taken from cannot be written."""
    if vector.place is None:
        return not vector.values.flags.writeable
    jax = sys.modules.get("jax")  # the one library on GPUs whose arrays never change
    return jax is not None and isinstance(array, jax.Array)


def on_device(device: devices.Device, array: Any) -> Flat:
    """View an array on this device as a vector there, of PyTorch's kind; raises what `flat` does, and for others."""
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{type(array).__name__} is no array on {device.name}: pass a tensor there")
    _require_values(array)
    kind, number = _device_of(array)
    if kind in devices.HOST or devices.of(kind, number) is not device:
        raise ValueError(f"the array is on device {(kind, number)}, not on {device.name}: pass a copy there")
    taken = _taken(device, array, FLOATS)
    nbytes = math.prod(taken.shape) * np.dtype(_storage(taken.dtype)).itemsize
    return Flat(taken.vector, taken.dtype, taken.shape, devices.Place(device, taken, nbytes))


def crossing(vector: Flat) -> Flat:
    """The same vector, with pinned memory if it is an array on a device; raises MemoryError where there is none."""
    staging = vector.staging
    if staging is None:
        return vector
    try:
        host = staging.pin()
    except RuntimeError as error:
        told = f"there is no pinned memory to take {vector.values.size} elements from {staging.device.name} to"
        raise MemoryError(f"{told} ({error}); free memory of the host, or pass an array that is there") from error
    return vector._replace(values=host.view(vector.values.dtype))


def _staged(device: devices.Device, array: Any, allowed: tuple[str, ...]) -> Flat:
    """The vector of an array on a device, which does not cross yet."""
    taken = _taken(device, array, allowed)
    storage, n = _storage(taken.dtype), math.prod(taken.shape)
    if not n:
        return Flat(np.empty(0, storage), taken.dtype, taken.shape)
    nothing = np.lib.stride_tricks.as_strided(np.zeros(1, storage), (n,), (0,))
    return Flat(nothing, taken.dtype, taken.shape, devices.Staging(device, taken, n * storage.itemsize))


def _taken(device: devices.Device, array: Any, allowed: tuple[str, ...]) -> devices.Taken:
    try:
        taken = device.take(array)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"the array on {device.name} cannot be used ({error}): pass a contiguous copy") from error
    _check(taken.dtype, allowed, taken.contiguous, f"on {device.name}")
    return taken


def _storage(dtype: str) -> np.dtype[Any]:
    """NumPy's type of elements."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def _check(name: str, allowed: tuple[str, ...], contiguous: bool, layout: str) -> None:
    if name not in allowed:
        raise TypeError(f"cannot reduce elements of type {name}: convert to one of {', '.join(allowed)}")
    if not contiguous:
        raise ValueError(f"the array is not contiguous ({layout}): pass a contiguous copy")


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return 0 in shape
        expected *= length
    return True


def empty_like(array: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A new array of the same library and element type, and of the same shape unless another is given.

    Raises
    ------
    TypeError
        The library of the array exports memory by DLPack, but makes no other arrays, or none that can be written.
    """
    shape = getattr(array, "shape", ()) if shape is None else shape
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    if hasattr(array, "new_empty"):
        return array.new_empty(shape)
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


@np.errstate(all="ignore")
def add(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """a + b; what overflows is infinite, and nobody is warned on one rank alone. `out` is overwritten."""
    np.add(a, b, out)


def minimum(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """The smaller of each two elements; NaN, unlike by MPI's own, where one is NaN. `out` is overwritten."""
    np.minimum(a, b, out=out)


def maximum(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """The larger of each two elements; NaN, unlike by MPI's own, where one is NaN. `out` is overwritten."""
    np.maximum(a, b, out=out)


Combine = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], Any]
"""Takes two vectors of a kind, and overwrites a third with what they make together."""

COMBINE: dict[str, Combine] = {"sum": add, "mean": add, "min": minimum, "max": maximum}
"""How the vectors of two ranks meet."""


def widen(values: NDArray[Any], dtype: str, out: NDArray[np.float32]) -> None:
    """float16 or bfloat16 (as uint16) to float32. `out` is overwritten."""
    if dtype == "bfloat16":
        np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        np.copyto(out, values, casting="unsafe")


def narrow(values: NDArray[np.float32], dtype: str, out: NDArray[Any]) -> None:
    """float32 to float16 or bfloat16 (as uint16), to nearest, ties to even; NaN stays NaN. `out` is overwritten."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        np.copyto(out, np.where(np.isnan(values), np.uint32(0x7FC0), rounded), casting="unsafe")
    else:
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="unsafe")
