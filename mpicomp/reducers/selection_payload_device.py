"""The payloads of all ranks where signs stay on a device: winners are drawn, and signs picked and placed, there."""

from __future__ import annotations

from functools import partial
from typing import Any

from collectives.devices import Device
from collectives.testable import Testable
from mpicomp.codecs.shared_selection import Winners
from mpicomp.feedback.on_device import Packed
from mpicomp.reducers.selection_payload import SelectionPayload


class DeviceSelectionPayload(SelectionPayload):
    """Payloads cross, and nothing else. Parameters: the device, then those of `SelectionPayload`.

    Attributes
    ----------
    bits, second : int64 tensors
    """

    def __init__(self, device: Device, *about: Any) -> None:
        self._device = device
        super().__init__(*about)
        self._packed = Packed(device, [words.reshape(-1) for words in self.words])

    def _reserve(self, n: int) -> Winners:
        return self._selection.reserve(n, self._device)

    def _zeros(self, words: int) -> Any:  # type: ignore[override]
        return self._device.zeros(words, "int64")

    def _draw(self, k: int, step: int) -> None:
        self._device.run(partial(super()._draw, k, step))

    def _pick(self, k: int) -> Testable | None:
        size = self._winners[k].words
        mine = slice(self._rank * size, (self._rank + 1) * size)
        payload = self._packed.pieces[k][mine]
        self._device.run(partial(self._selection.encode, self._votes[k][0], self._rank, self._winners[k], payload))
        return self._packed.fetch(k, mine)

    def _place(self, k: int) -> None:
        self._packed.deliver(k)
        payloads, winners = self._packed.pieces[k], self._winners[k]
        self._device.run(partial(self._selection.decode, payloads, winners.words, winners, self._votes[k]))
