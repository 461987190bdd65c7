"""SSDM's votes of a vector on a device: momentum and norms are made there, and signs drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.testable import Testable
from mpicomp.feedback.scaled_votes_device import DeviceScaledVotes
from mpicomp.feedback.stochastic_votes import StochasticVotes


class DeviceStochasticVotes(DeviceScaledVotes, StochasticVotes):
    """Momentum and norms of one vector. Parameters: the device, then those of `StochasticVotes`."""

    def square(self) -> Testable | None:
        """See `StochasticVotes`: tells when the sums are on the host."""
        self._device.run(super().square)
        return self._sums_mirror.fetch()

    def set_scales(self, norms: NDArray[np.float64], values: NDArray[Any]) -> bool:
        """See `StochasticVotes`."""
        representable = super().set_scales(norms, values)
        self._factors_there.send(self._factors)
        return representable

    def encode(self, piece: int) -> Testable | None:
        """See `StochasticVotes`: tells when the signs are on the host."""
        self._device.run(partial(self._encode, piece))
        return self._packed.fetch(piece, slice(self._words(piece)))
