"""The vectors that `mpicomp bench` reduces, where calls find them and where they are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.arrays import Device, wait
from collectives.arrays.elements import aligned_empty
from mpicomp.cli.rank0 import require_none

TILE = 1 << 20  # elements drawn, or compared, at a time
Vector = NDArray[Any]
Call = Callable[[Any, Any], object]
"""From the first vector into the second."""


class Vectors:
    """A rank's vector, and room for a result.

    Parameters
    ----------
    n : int
    dtype : str

    Attributes
    ----------
    x, out : ndarray[n]
        In the host's memory, where they are looked at.
    given, target : array[n]
        What calls take: the same, or on a device.
    """

    def __init__(self, n: int, dtype: str) -> None:
        self.x, self.out = self._empty(n, dtype), self._empty(n, dtype)
        self.given: Any = self.x
        self.target: Any = self.out

    def _empty(self, n: int, dtype: str) -> Vector:
        return aligned_empty(n, dtype, 64)

    def fill(self, seed: int, rank: int) -> None:
        """Normally distributed numbers, others on each rank."""
        random = np.random.default_rng((seed, rank))
        for start in range(0, self.x.size, TILE):
            self.x[start : start + TILE] = random.standard_normal(min(TILE, self.x.size - start), np.float32)

    def take(self, call: Call) -> None:
        """Make a call, and bring its result to where it is looked at."""
        call(self.given, self.target)

    def through_host(self, call: Call) -> Call:
        """A call of arrays in the host's memory, of those that calls take here."""
        return call


class DeviceVectors(Vectors):
    """The same on a device; the host's memory is pinned. Parameters as in `Vectors`, behind the device."""

    def __init__(self, device: Device, n: int, dtype: str) -> None:
        self._device = device
        super().__init__(n, dtype)
        self.given, self.target = tensor(device, n, dtype), tensor(device, n, dtype)

    def _empty(self, n: int, dtype: str) -> Vector:
        return self._device.pinned(n * np.dtype(dtype).itemsize).view(dtype)

    def _copy(self, source: Any, target: Any) -> None:
        """Copy a vector to the device or from it, and wait for the end."""
        ends = [one if isinstance(one, np.ndarray) else self._device.take(one).vector for one in (source, target)]
        wait(self._device.copy(*ends))

    def fill(self, seed: int, rank: int) -> None:
        """See `Vectors`."""
        super().fill(seed, rank)
        self._copy(self.x, self.given)

    def take(self, call: Call) -> None:
        """See `Vectors`."""
        super().take(call)
        self._copy(self.target, self.out)

    def through_host(self, call: Call) -> Call:
        """See `Vectors`: behind a copy to the host, and before one back."""

        def staged(given: Any, target: Any) -> None:
            self._copy(given, self.x)
            call(self.x, self.out)
            self._copy(self.out, target)

        return staged


def tensor(device: Device, n: int, dtype: str) -> Any:
    """A vector of zeros on a device, as a user would pass it."""
    return device.zeros(n, dtype)


def make_vectors(comm: Communicator, n: int, dtype: str, device: Device | None) -> Vectors:
    """Make a rank's vectors; UsageError on every rank if there is no room for them; collective."""
    vectors, problem = None, ""
    try:
        vectors = Vectors(n, dtype) if device is None else DeviceVectors(device, n, dtype)
    except (MemoryError, ValueError, RuntimeError) as error:  # the last is PyTorch's
        problem = f"rank {comm.rank} of {comm.size}: --count {n}: {error}; take fewer elements, or fewer ranks per node"
    require_none(comm.mpi_comm, problem, comm.timeout)
    assert vectors is not None
    return vectors
