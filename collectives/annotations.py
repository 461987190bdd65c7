"""Type aliases for annotations, `Testable`, and `override`, which `typing` has from Python 3.12 on.

Annotations name the kind of array instead of `Any`: its memory and its element type. Those of public functions keep the
kind that the caller passes: `Kept`, and `Result` of a handle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

AnyArray: TypeAlias = NDArray[Any]
"""Array of the host, of any type."""
FloatArray: TypeAlias = NDArray[Any]
"""Array of the host: float32, float64, or 16-bit floats (uint16 for bfloat16)."""
Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[np.uint64]
"""Packed bits."""
Indices: TypeAlias = NDArray[np.int64]
Doubles: TypeAlias = NDArray[np.float64]
Tensor: TypeAlias = Any
"""PyTorch tensor on a device, in modules that do not import PyTorch."""
Array: TypeAlias = Any
"""Array of the host or tensor on a device: code that serves both."""


class SupportsDLPack(Protocol):
    """Array of NumPy, PyTorch or another library that exports its memory."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule with the array's memory."""
        ...


Kept = TypeVar("Kept", bound=SupportsDLPack)
"""Array whose library and dtype the result has too."""


class Testable(Protocol):
    """Work under way that can be polled: requests of MPI, exchanges of ranks, work of devices."""

    __slots__ = ()

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Make progress without waiting; True once the work is over."""
        ...


if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault
    from typing_extensions import override as override

    Result = TypeVarWithDefault("Result", covariant=True, default=Any)
else:
    Result = TypeVar("Result", covariant=True)
    _Method = TypeVar("_Method")

    def override(method: _Method) -> _Method:
        """Mark a method that overrides one of a base class; its contract is documented there."""
        return method
