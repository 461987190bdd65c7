"""The host's memory as a memory space: nothing crosses, and work is finished when its call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray, Array, Bytes, Testable, Words
from collectives.arrays import wait
from collectives.arrays.elements import PAGE, aligned_empty
from collectives.execution.payload import MessageMemory
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.kernels import Kernels, of
from mpicomp.spaces.finite_flag import FiniteFlag
from mpicomp.spaces.mirror import Mirror, Packed


class Space:
    """The host's memory. `mpicomp.spaces.device_space.DeviceSpace` overrides the methods for a device.

    Handles that the methods return are None: all work is done.
    """

    name, kind, is_host = "cpu", "cpu", True
    word = "uint64"  # type of packed bits

    @property
    def kernels(self) -> Kernels:
        """Kernels of vectors in this memory."""
        return of(self.kind)

    # Memory ----------------------------------------------------------------------------------------------------------

    def zeros(self, n: int, dtype: DTypeLike) -> Array:
        """Return a vector of zeros. On the host it begins at a page, as streaming stores ask for."""
        # pages stay untouched until something is written: an owner uses a part of its residual alone
        nbytes = n * np.dtype(dtype).itemsize
        room = np.zeros(nbytes + PAGE, np.uint8)
        start = -room.ctypes.data % PAGE
        return room[start : start + nbytes].view(dtype)

    def empty(self, n: int, dtype: DTypeLike) -> Array:
        """Return a vector that its user overwrites; on the host it begins at a page, as messages should."""
        return aligned_empty(n, dtype)

    def words(self, out: Array) -> Array:
        """Return a vector as unsigned words on the host, as integers on a device: kernels write 16-bit floats so."""
        return out.view(UNSIGNED[out.itemsize])

    def message(self, words: Array) -> MessageMemory:
        """Return a vector of words as a message of MPI."""
        from mpi4py import MPI  # states are converted without it

        return [words, words.nbytes, MPI.BYTE]

    # Copies ----------------------------------------------------------------------------------------------------------

    def mirror(self, there: Array) -> Mirror:
        """Return a vector's memory of the host, which parts of it are copied to and from."""
        return Mirror(there)

    def packed(self, words: Sequence[Words]) -> Packed:
        """Return a reducer's packed words, piece by piece."""
        return Packed(words)

    def sent(self, values: AnyArray) -> Mirror:
        """Return a copy of an array of the host; kernels that are launched from now on find it."""
        mirror = self.mirror(self.zeros(values.size, values.dtype))
        mirror.send(values)
        return mirror

    def saved(self, vector: Array) -> AnyArray:
        """Return a copy in the host's memory; waits for a device."""
        mirror = self.mirror(vector)
        wait(mirror.fetch())
        copy: AnyArray = mirror.here.copy()
        return copy

    def overwrite(self, vector: Array, values: Array) -> None:
        """Overwrite a vector with an array of the host, for which this waits, or with another vector of the space."""
        vector[:] = values

    # Work ------------------------------------------------------------------------------------------------------------

    def launch(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call a function that launches kernels."""
        work(*arguments)

    def bound(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that launches kernels, for calls from anywhere."""
        return work

    def done(self) -> Testable | None:
        """Return a handle that completes once all kernels launched so far have."""
        return None

    def flag(self, memory: tuple[Array, Bytes] | None = None) -> FiniteFlag:
        """Return a flag of a step; memory : as in `DeviceFlag`."""
        return FiniteFlag()

    def all_finite(self, values: Array) -> bool:
        """Whether a float32 or float64 vector has neither NaN nor infinity; waits for a device."""
        flag = self.flag()
        flag.reset()
        self.launch(flag.check, self.kernels.sign.all_finite, values)
        wait(flag.fetch())
        return bool(flag)


HOST = Space()
"""The host's memory, which all code shares."""
