"""Values of vote counts on a device: complete counts cross to it, and become values there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.devices import Device
from collectives.testable import Testable
from mpicomp.codecs.vote_counts import planes_of
from mpicomp.feedback.on_device import Mirror, OnDevice, Packed
from mpicomp.feedback.scaled_votes import ScaledVotes


class DeviceScaledVotes(OnDevice, ScaledVotes):
    """What EF-signSGD's and SSDM's feedback on a device share. Parameters: the device, then those of the feedback.

    A class that inherits from it and from the feedback on the host has the feedback's state in tensors.
    """

    _packed: Packed

    def __init__(self, device: Device, *about: Any) -> None:
        super().__init__(device, *about)
        self._sums_mirror = Mirror(device, self._sums)
        self._host_sums = self._sums_mirror.here
        groups = self.groups
        self._mirrors = [Mirror.of(device, table) for table in (groups.starts, groups.stops, groups.firsts)]
        self._tables = tuple(mirror.there for mirror in self._mirrors)
        self._factors_there = Mirror.of(device, self._factors)

    def lay_out(self, counts: Sequence[NDArray[np.uint64]]) -> None:
        """See `ScaledVotes`; the counts are the host's."""
        self._packed = Packed(self._device, counts)
        super().lay_out(self._packed.pieces)

    def _take_out(self, out: Any) -> None:
        self._out = self._as_integers(out)

    def finish(self, piece: int) -> Testable | None:
        """See `ScaledVotes`: tells when the values are there."""
        device, cut = self._device, self._pieces[piece]
        target, codes = (whole[cut.start : cut.stop] for whole in (self._target, self._out))
        counts = self._counts[piece], planes_of(self._ranks), self._words(piece)
        where = *self._tables[:2], cut.start, *self._spans[piece]
        self._packed.deliver(piece)
        few_values, factors = self._kernels.vote_counts.few_values, self._factors_there.there
        device.run(partial(few_values, *counts, None, -self._ranks, factors, *where, False, target))
        if self._narrow:
            narrow = self._kernels.sixteen_bits.narrow
            device.run(partial(narrow, target, self._dtype == "bfloat16", codes))
        return device.done()

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        return {key: np.broadcast_to(np.zeros((), self._factors.dtype), (self._n,)) for key in super().like()}
