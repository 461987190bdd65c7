"""Votes of a vector on a device: its signs are packed there, counted and decided on the host, and unpacked there."""

from __future__ import annotations

from functools import partial
from typing import Any

from collectives.devices import Device, Landed
from collectives.testable import Testable
from mpicomp.feedback.majority import MajorityCodec
from mpicomp.feedback.on_device import Mirror, OnDevice, Packed


class DeviceMajority(OnDevice, MajorityCodec):
    """One vector's votes. Parameters: the device, then those of `MajorityCodec`."""

    def __init__(self, device: Device, *about: Any) -> None:
        super().__init__(device, *about)
        self._packed = Packed(device, self._counts)
        self._are_finite = Mirror(device, device.zeros(len(self._pieces), "uint8"))

    def _take_out(self, out: Any) -> None:
        self._out = self._as_integers(out)

    def encode(self, piece: int) -> Testable:
        """See `MajorityCodec`: tells when the signs are on the host."""
        self._device.run(partial(self._encode_there, piece))
        self._are_finite.fetch(slice(piece, piece + 1))
        return Landed(self._packed.fetch(piece, slice(self._words[piece])), partial(self._look, piece))

    def _encode_there(self, piece: int) -> None:
        self._are_finite.there[piece].copy_(self._encode(piece, self._packed.pieces[piece]))

    def _look(self, piece: int) -> None:
        if not self._are_finite.here[piece]:
            self.finite = False

    def finish(self, piece: int) -> Testable | None:
        """See `MajorityCodec`: tells when the result is there."""
        self._packed.deliver(piece, slice(self._words[piece]))
        self._device.run(partial(self._finish, piece, self._packed.pieces[piece]))
        return self._device.done()
