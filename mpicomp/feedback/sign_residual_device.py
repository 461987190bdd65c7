"""Marsit's feedback on a device: the vector is encoded where it lies, and only its signs cross to the host.

The same kernels by name, so the same bits. Signs go to the host piece by piece, where they travel and are merged, and
merged signs come back. What the ranks tell each other, sums of magnitudes and clipped elements, crosses with the signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.testable import Testable
from mpicomp.feedback.on_device import Mirror, OnDevice, Packed
from mpicomp.feedback.sign_residual import SignResidual


class DeviceSignResidual(OnDevice, SignResidual):
    """Residual and running magnitudes of one vector on a device. Parameters: the device, then those of `SignResidual`.

    Attributes
    ----------
    residual : tensor[n] or None
        On the device.
    """

    _packed: Packed | None = None
    _spans: list[slice]
    _dense: tuple[NDArray[Any], NDArray[Any]] | None = None  # memory of full-precision rounds, on the host
    _spare: Any = None  # on the device: what was before a step that may fail

    def lay_out(self, pieces: Sequence[range], bits: Any, second: Any = None) -> None:
        """See `SignResidual`; bits of the host cross to it and back, tensors on the device stay there."""
        if isinstance(bits, np.ndarray):
            words = [slice(cut.start // 64, -(-cut.stop // 64)) for cut in pieces]
            self._packed = Packed(self._device, [bits[some] for some in words])
            super().lay_out(pieces, self._packed.whole)
            self._host_bits = bits
        else:
            super().lay_out(pieces, bits, second)
        counts = np.cumsum([0, *(sum(len(part.sums) for part in parts) for parts in self._parts)]).tolist()
        self._spans = [slice(start, stop) for start, stop in pairwise(counts)]
        self._sums_mirror = Mirror(self._device, self._sums)
        self._clipped_mirror = Mirror(self._device, self._device.zeros(len(pieces), "int64"))
        self._host_sums, self._host_clipped = self._sums_mirror.here, self._clipped_mirror.here
        self._clipped = self._clipped_mirror.there
        if self.residual is not None and self.rule.transactional:
            self._spare = self._zeros(self._n, self._compute)
        self._zero_sums, self._stateless = self._stateless, False  # one kernel packs all, and sums too

    # One step --------------------------------------------------------------------------------------------------------

    def _take_out(self, out: Any) -> None:
        self._out = self._as_integers(out)

    def _encode_part(self, piece: int, *arguments: Any) -> None:
        self._kernels.encode(*arguments, self._clipped[piece : piece + 1])

    def _forget_clipped(self) -> None:
        self._device.run(self._clipped.zero_)
        self._host_clipped[:] = 0

    def encode(self, piece: int) -> Testable | None:
        """See `SignResidual`: tells when the signs are on the host."""
        device, sums = self._device, self._spans[piece]
        self._encoding = True
        device.run(partial(self._encode, piece))
        if self._zero_sums:
            device.run(partial(self._sums[sums].mul_, 0.0))  # NaN where a value is not finite
        self._sums_mirror.fetch(sums)
        clipped = self._clipped_mirror.fetch(slice(piece, piece + 1))
        return clipped if self._packed is None else self._packed.fetch(piece)

    def finish(self, piece: int) -> Testable | None:
        """See `SignResidual`: tells when the result is there."""
        if self._packed is not None:
            self._packed.deliver(piece)
        self._device.run(partial(self._finish, piece))
        return self._device.done()

    def measure(self) -> Testable | None:
        """See `SignResidual`."""
        self._device.run(super().measure)
        return self._sums_mirror.fetch()

    def dense_memory(self, wide: Any, out: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """See `SignResidual`: memory of the host."""
        if self._dense is None:
            pinned, size = self._device.pinned, self._n * self._stored.itemsize
            total = pinned(self._n * self._compute.itemsize).view(self._compute)
            self._dense = total, pinned(size).view(self._stored) if self._narrow else total
        return self._dense

    def add_and_clear(self, total: Any) -> Testable | None:
        """See `SignResidual`; `total` is the host's."""
        vector = self._vector()
        there = vector if self._narrow else self._out.view(vector.dtype)  # what is widened may be overwritten
        self._device.run(partial(super().add_and_clear, there))
        self._sums_mirror.fetch()
        return self._device.copy(there, total)

    def deliver(self, mean: NDArray[Any]) -> Testable | None:
        """See `SignResidual`."""
        return self._device.copy(mean, self._out)

    def clear(self, out: Any) -> Testable | None:  # type: ignore[override]
        """See `SignResidual`."""
        self._device.run(out.zero_)
        return self._device.done()

    # State -----------------------------------------------------------------------------------------------------------

    def _settled(self) -> Any:
        """A copy on the device."""
        if self.residual is None:
            return None
        settled = self._zeros(self._n, self._compute) if self._spare is None else self._spare
        self._overwrite(settled, self.residual)
        self._device.run(partial(self._settle, settled))
        return settled

    def settled_residual(self) -> NDArray[Any] | None:
        """The residual with nothing pending; a copy on the host."""
        settled = self._settled()
        return None if settled is None else self._to_host(settled)

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        found = super().like()
        if self.residual is not None:
            found["residual"] = np.broadcast_to(np.zeros((), self._compute), (self._n,))
        return found
