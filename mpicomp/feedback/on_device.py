"""What codecs that work on a device have in common: vectors there, and the host's memory that they cross through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.devices import Device, Landed, wait
from collectives.testable import Testable
from mpicomp import kernels

ALL = slice(None)


class Mirror:
    """A vector on a device, and pinned memory of the host that parts of it are copied to and from.

    Parameters
    ----------
    device : Device
    there : tensor[n]

    Attributes
    ----------
    here : ndarray[n]
        Of the same type; undefined until something is written to it.
    """

    def __init__(self, device: Device, there: Any) -> None:
        self._device, self.there = device, there
        nbytes = there.numel() * there.element_size()
        self.here: NDArray[Any] = device.pinned(nbytes).view(str(there.dtype).removeprefix("torch."))

    @classmethod
    def of(cls, device: Device, values: NDArray[Any]) -> Mirror:
        """A copy of an array on the device, which kernels that are launched from now on find there."""
        mirror = cls(device, device.zeros(values.size, values.dtype.name))
        mirror.send(values)
        return mirror

    def fetch(self, some: slice = ALL) -> Testable | None:
        """Begin to overwrite the host's memory."""
        return self._device.copy(self.there[some], self.here[some])

    def deliver(self, some: slice = ALL) -> Testable | None:
        """Begin to overwrite the vector."""
        return self._device.copy(self.here[some], self.there[some])

    def send(self, values: NDArray[Any]) -> Testable | None:
        """Begin to overwrite the vector with values; what was sent before has arrived."""
        self.here[:] = values
        return self.deliver()


class Packed:
    """A reducer's packed words, piece by piece, and their place on a device.

    Parameters
    ----------
    device : Device
    host : sequence of uint64 arrays
        The reducer's words of each piece.

    Attributes
    ----------
    whole : int64 tensor
        The words of all pieces, one piece behind the other.
    pieces : list of int64 tensors
    """

    def __init__(self, device: Device, host: Sequence[NDArray[np.uint64]]) -> None:
        starts = [*accumulate((words.size for words in host), initial=0)]
        self._host, self._starts = host, starts
        self._mirror = Mirror(device, device.zeros(starts[-1], "int64"))
        self.whole = self._mirror.there
        self.pieces = [self.whole[start:stop] for start, stop in pairwise(starts)]

    def _place(self, piece: int, some: slice) -> slice:
        first, stop, _ = some.indices(self._host[piece].size)
        return slice(self._starts[piece] + first, self._starts[piece] + stop)

    def fetch(self, piece: int, some: slice = ALL) -> Testable | None:
        """Copy words of a piece to the reducer; tells when they are there."""
        return Landed(self._mirror.fetch(self._place(piece, some)), partial(self._land, piece, some))

    def _land(self, piece: int, some: slice) -> None:
        self._host[piece][some] = self._mirror.here[self._place(piece, some)].view(np.uint64)

    def deliver(self, piece: int, some: slice = ALL) -> None:
        """Have words of a piece copied from the reducer, for kernels that are launched from now on."""
        place = self._place(piece, some)
        self._mirror.here[place] = self._host[piece][some].view(np.int64)
        self._mirror.deliver(place)


class OnDevice:
    """Mixed into a codec whose vectors are in the host's memory: those of the class that results are on a device.

    Parameters
    ----------
    device : Device
    about
        What the codec itself is made of.

    Attributes
    ----------
    seen_finite : bool
        Whether the vector that `look` was given is finite.
    """

    seen_finite = True

    def __init__(self, device: Device, *about: Any) -> None:
        self._device = device
        self._integers = {size: device.zeros(0, f"int{8 * size}").dtype for size in (2, 4, 8)}
        super().__init__(*about, "cuda")  # type: ignore[call-arg]

    def _zeros(self, n: int, dtype: Any) -> Any:
        """Memory for what kernels work on."""
        return self._device.zeros(n, np.dtype(dtype).name)

    def _as_integers(self, out: Any) -> Any:
        """A vector as words of its elements' size, the only type in which kernels write 16-bit floats."""
        return out.view(self._integers[out.element_size()])

    def _to_host(self, vector: Any) -> NDArray[Any]:
        """A copy in the host's memory; waits for the device."""
        mirror = Mirror(self._device, vector)
        wait(mirror.fetch())
        return mirror.here.copy()

    def _overwrite(self, vector: Any, values: Any) -> None:
        """Overwrite a vector with another one there, or with an array of the host, for which it waits."""
        if isinstance(values, np.ndarray):
            wait(Mirror(self._device, vector).send(values))
        else:
            self._device.run(partial(vector.copy_, values))

    def look(self, values: Any) -> Testable:
        """Have `seen_finite` tell what `all_finite` does; tells when it does."""
        flag = Mirror(self._device, self._device.zeros(1, "uint8"))
        self._device.run(lambda: flag.there.copy_(kernels.of("cuda").sign.all_finite(values)))
        return Landed(flag.fetch(), lambda: setattr(self, "seen_finite", bool(flag.here[0])))

    def all_finite(self, values: Any) -> bool:
        """Whether a float32 or float64 vector has neither NaN nor infinity; waits for the device."""
        wait(self.look(values))
        return self.seen_finite
