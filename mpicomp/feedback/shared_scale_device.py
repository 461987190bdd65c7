"""EF-signSGD's feedback on a device: the residual is there, and signs and norms of it cross to the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.devices import Device
from collectives.testable import Testable
from mpicomp.feedback.on_device import Mirror
from mpicomp.feedback.scaled_votes_device import DeviceScaledVotes
from mpicomp.feedback.shared_scale import SharedScale


class DeviceSharedScale(DeviceScaledVotes, SharedScale):
    """The residual and the scales of one vector. Parameters: the device, then those of `SharedScale`."""

    def __init__(self, device: Device, *about: Any) -> None:
        super().__init__(device, *about)
        self._blocks = [self.groups.blocks_in(cut) for cut in self._pieces]
        # scales of the last step and of this one
        self._last, self._new = (Mirror.of(device, self.scales) for _ in range(2))

    def encode(self, piece: int) -> Testable | None:
        """See `SharedScale`: tells when the signs are on the host, and sums with them."""
        self._device.run(partial(self._encode, piece, self._last.there))
        self._sums_mirror.fetch(self._blocks[piece])
        return self._packed.fetch(piece, slice(self._words(piece)))

    def take_scales(self, norms: NDArray[np.float64]) -> bool:
        """See `SharedScale`."""
        representable = super().take_scales(norms)
        self._factors_there.send(self._factors)
        self._new.send(self._new_scales)
        return representable

    def commit(self) -> None:
        """See `SharedScale`."""
        if self._values is not self._nothing:
            self._last, self._new = self._new, self._last
        super().commit()

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `SharedScale`."""
        told = super().load(state)
        self._last.send(self.scales)
        return told
