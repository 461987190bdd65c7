"""The memory of methods whose ranks all send the same elements, on a device.

The same kernels by name, so the same bits. Vector, residual and result stay there. The host gets the values at the
places, and on the rank that says which these are their indices; it gives means, and indices of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.devices import Device, Landed
from collectives.testable import Testable
from mpicomp.codecs.top_k import Selector
from mpicomp.feedback.memory import Memory, Part
from mpicomp.feedback.on_device import ALL, Mirror, OnDevice

_FINITE, _WITHIN = slice(0, 1), slice(1, 2)


def joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The same chunks in as few parts as may be: those of one kind that follow each other without a short one."""
    runs: list[Part] = []
    for part in parts:
        before = runs[-1] if runs else None
        if (
            before is not None
            and (before.chunk, before.keep) == (part.chunk, part.keep)
            and (before.stop - before.start) % part.chunk == 0
        ):
            runs[-1] = replace(before, stop=part.stop, last=part.last)
        else:
            runs.append(part)
    return tuple(runs)


class DeviceMemory(OnDevice, Memory):
    """Memory of one vector on a device. Parameters as in `Memory`, behind the device.

    Attributes
    ----------
    residual : tensor[n]
    places : int64 tensor[k]
    indices : uint32[k]
        In the host's memory: places within their chunks, of all parts.
    """

    def __init__(self, device: Device, *about: Any) -> None:
        super().__init__(device, *about)
        self.runs = joined(self.parts)
        self._whole = (Part(0, self.residual.numel(), 1, 1, 0, self.values.size),)
        count, words = self.values.size, self.means.itemsize
        self._picked, self._arrived = self._zeros(count, self.dtype), self._zeros(count, f"int{8 * words}")
        self._indices = Mirror(device, self._zeros(count, np.int32))
        self.indices: NDArray[np.uint32] = self._indices.here.view(np.uint32)
        self._flags = Mirror(device, self._zeros(2, np.uint8))
        self._selectors = {(run.chunk, run.keep): Selector(run.chunk, run.keep, self.dtype) for run in self.runs}

    def mirror(self) -> Mirror:
        """Another vector in the type of computing, and memory of the host for it."""
        return Mirror(self._device, self._zeros(self.residual.numel(), self.dtype))

    def _crossing(self, n: int, dtype: Any) -> NDArray[Any]:  # type: ignore[override]
        return self._device.pinned(n * np.dtype(dtype).itemsize).view(dtype)

    # Before values travel --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Memory`."""
        self._summed = False
        self._device.run(partial(self._flags.there.fill_, 1))

    def _note(self, flag: slice, answer: Any) -> None:
        self._flags.there[flag].mul_(answer)

    def check(self, part: Part, vector: Any) -> None:
        """See `Memory`: `finite` is told by `pick`."""
        self._check(vector, self.residual, part.elements)

    def check_all(self, vector: Any, residual: Any = None) -> None:
        """As `check`, of a whole vector, with a residual or without any."""
        self._check(vector, residual, ALL)

    def _check(self, vector: Any, residual: Any, some: slice) -> None:
        if residual is None:
            look = partial(self._kernels.sign.all_finite, vector[some])
        else:
            terms = vector[some], residual[some], self.sums(some)
            look = partial(self._kernels.sparse.finite_sum, *terms)
        self._device.run(lambda: self._note(_FINITE, look()))

    def add(self, vector: Any, out: Any) -> None:
        """Overwrite `out` with vector + residual."""
        self._device.run(partial(self._kernels.error_feedback.compensate, vector, self.residual, None, out))

    def find(self, vector: Any, residual: Any) -> None:
        """Make the places those of the largest of vector + residual, and take note of whether that is finite.

        residual : tensor[n]; or None, where nobody asks whether the vector is finite.
        """
        for run in self.runs:
            sums = None if residual is None else self.sums(run.elements)
            self._device.run(partial(self._find, run, vector, residual, sums))
            self._device.run(partial(super().place, run, self._indices.there[run.values]))

    def _find(self, run: Part, vector: Any, residual: Any, sums: Any) -> None:
        x, rest = vector[run.elements], None if residual is None else residual[run.elements]
        indices, found = self._indices.there[run.values], self._picked[run.values]
        finite = self._selectors[run.chunk, run.keep](x, rest, indices, found, sums)
        if rest is not None:
            self._note(_FINITE, finite)

    def fetch_indices(self) -> Testable | None:
        """Copy the indices of `find` to the host; tells when they are there."""
        return self._indices.fetch()

    def place_all(self) -> None:
        """Make the places those of the host's indices."""
        self._indices.deliver()
        for run in self.runs:
            self._device.run(partial(super().place, run, self._indices.there[run.values]))

    def draw_places(self, *about: Any) -> None:
        """See `Memory`."""
        self._device.run(partial(super().draw_places, *about))

    def pick(self, vector: Any) -> Testable:
        """See `Memory`."""
        self._device.run(lambda: self._note(_WITHIN, self._pick(vector, self._picked)))
        self._device.copy(self._picked, self.values)
        return Landed(self._flags.fetch(), self._told)

    def _told(self) -> None:
        self.finite, self.within = self._flags.here.astype(bool).tolist()

    # While they travel -----------------------------------------------------------------------------------------------

    @property
    def shares(self) -> Sequence[Part]:
        """See `Memory`: one."""
        return self._whole

    def clear(self, out: Any, share: Part) -> None:
        """See `Memory`."""
        self._device.run(out.zero_)

    def renew(self, vector: Any, share: Part) -> None:
        """See `Memory`."""
        self._device.run(partial(self._remember, vector, share.start, share.elements, share.values))
        self._renewed = True

    # Afterwards ------------------------------------------------------------------------------------------------------

    def settled(self) -> Testable | None:
        """See `Memory`."""
        return self._device.done()

    def scatter(self, out: Any) -> Testable | None:
        """See `Memory`."""
        self._device.copy(self.means, self._arrived)
        self._device.run(partial(self._kernels.sparse.put, self._arrived, self.places, self._as_integers(out)))
        return self._device.done()

    # State -----------------------------------------------------------------------------------------------------------

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        return {"residual": np.broadcast_to(np.zeros((), self.dtype), (self.residual.numel(),))}

    def state(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`: copies in the host's memory."""
        return {"residual": self._to_host(self.residual)}

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        self._overwrite(self.residual, state["residual"])
        return ""
