"""Memory of the host that another library's array occupies, by DLPack: its address, element type and layout."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from collectives.annotations import AnyArray, Array
from collectives.arrays.elements import storage

_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class Exported(NamedTuple):
    """An array in the host's memory, as its library describes it; `owners` keep the memory alive."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None: contiguous in C order
    address: int  # 0: there is no memory
    is_writable: bool
    owners: tuple[object, ...]

    @property
    def is_contiguous(self) -> bool:
        """True if the elements follow each other in C order."""
        return self.strides is None or _are_contiguous(self.shape, self.strides)

    def vector(self) -> AnyArray:
        """Return the elements of a contiguous array as a vector that keeps the memory alive; bfloat16 is uint16.

        Raises
        ------
        ValueError
            The array has elements and no memory.
        """
        stored, n = storage(self.dtype), math.prod(self.shape)
        if not n:
            values = np.empty(0, stored)
        elif not self.address:
            raise ValueError(
                f"the {type(self.owners[0]).__name__} has no memory of its own, as it was freed or stands for another "
                "tensor: pass a dense tensor that holds the values"
            )
        else:
            memory: Any = (ctypes.c_uint8 * (n * stored.itemsize)).from_address(self.address)
            memory.owner = self.owners
            values = np.frombuffer(memory, stored)
        if not self.is_writable:
            values.flags.writeable = False
        return values


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


_NOT_TO_BE_WRITTEN = 0b11  # flags: the memory is read-only, or a copy whose changes the array does not see
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype = ctypes.c_char_p
_name_of.argtypes = (ctypes.py_object,)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def require_values(array: Array) -> None:
    """Raise unless the memory of a tensor holds its values, and nothing else is needed to read them."""
    if getattr(array, "requires_grad", False):
        raise TypeError("the tensor requires grad, so reducing it would cut the graph: pass tensor.detach()")
    is_negated = getattr(array, "is_neg", None)  # PyTorch alone has it, and DLPack does not export the flag
    if is_negated is not None and is_negated():
        raise ValueError("the tensor is a negated view of its memory: pass tensor.resolve_neg()")


def device_numbers(array: Array) -> tuple[int, int]:
    """Return kind and index of the device that holds an array, by their numbers in DLPack."""
    try:
        kind, index = array.__dlpack_device__()
        return int(kind), int(index)
    except Exception as error:
        raise _not_plain(array, error) from error


def exported(array: Array) -> Exported:
    """Return the description of an array in the host's memory; raises ValueError if its library does not export it."""
    capsule = _capsule(array)
    if _name_of(capsule) == b"dltensor_versioned":
        versioned = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        tensor, is_writable = versioned.tensor, not versioned.flags & _NOT_TO_BE_WRITTEN
    else:
        tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
        is_writable = not _is_immutable(array)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    address = tensor.data + tensor.byte_offset if tensor.data else 0
    return Exported(_type_name(tensor, array), shape, strides, address, is_writable, (array, capsule))


def _type_name(tensor: _Tensor, array: Array) -> str:
    if tensor.code in _CODES:
        name = f"{_CODES[tensor.code]}{tensor.bits}"
        name = "bool" if name == "bool8" else name  # NumPy's name
    else:
        name = str(getattr(array, "dtype", "unknown"))
    return name if tensor.lanes == 1 else f"{name}x{tensor.lanes}"


def _capsule(array: Array) -> object:
    try:
        try:
            return array.__dlpack__(max_version=(1, 0))
        except TypeError:  # a library from before version 1
            return array.__dlpack__()
    except Exception as error:
        raise _not_plain(array, error) from error


def _not_plain(array: Array, error: Exception) -> ValueError:
    """Return the error for an array that its own library does not export: sparse, conjugated, traced, ..."""
    if str(getattr(array, "device", "")) == "meta":
        cure = "make it where it has values, such as by module.to_empty(device='cpu') and an initialization"
        return ValueError(f"the tensor is on device meta, where it has a shape and no values: {cure}")
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(f"the {type(array).__name__} is not plain memory ({reason:.200}): pass a dense contiguous copy")


def _is_immutable(array: Array) -> bool:
    """Return True if NumPy sees the array as read-only; versions of DLPack before 1 have no flag for it."""
    try:
        if hasattr(array, "__array_interface__"):
            return bool(array.__array_interface__["data"][1])
        return hasattr(array, "__array__") and not np.asarray(array).flags.writeable
    except Exception:  # noqa: BLE001 - of any library, which does not let NumPy see it
        return False


def _are_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return 0 in shape
        expected *= length
    return True
