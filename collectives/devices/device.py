"""What a device is, as far as calls need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.testable import Testable

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
    """One device, as far as calls need it. It may do later what it is given to do; `HostDevice` does it at once.

    Kernels follow upon kernels and upon copies to the device. They do not wait for copies to the host, which are made
    while others compute. Copies follow upon the kernels before and upon copies in the same direction; copies to the
    host and copies to the device do not wait for each other. So whoever overwrites what is still being copied, or
    copies back what is still on its way, waits for that copy first.

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

    def copy(self, source: Any, target: Any) -> Testable | None:
        """Copy a vector, of which either end is the host's, byte by byte.

        Returns
        -------
        Testable or None
            Done once this copy and all earlier ones in its direction are; None: they are done already.
        """
        ...

    def use(self) -> None:
        """Make it the calling thread's current one, for libraries that work with whichever that is."""
        ...

    def done(self) -> Testable | None:
        """Return a handle that is done once all kernels launched so far are; None: they are done already."""
        ...
