"""Cascading compression on a device: sums stay there, and of every hop the payload alone crosses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from collectives.devices import Device
from collectives.testable import Testable
from mpicomp.feedback.mirror import Mirror
from mpicomp.feedback.payloads import Payloads
from mpicomp.reducers.cascade import CascadePayload


class DeviceCascadePayload(CascadePayload):
    """Sums are decoded, added and encoded there. Parameters: the device, then those of `CascadePayload`."""

    receive_buffers = 2  # one message travels while another is added and compressed

    def __init__(self, device: Device, *about: Any) -> None:
        self._device = device
        super().__init__(*about)
        self._mirror = Mirror(device, self._length)
        self._length_here = self._mirror.here

    def _zeros(self, n: int) -> Any:
        return self._device.zeros(n, "float32")

    def _payloads(self, lengths: Sequence[int]) -> Payloads:
        return Payloads(self._device, self._codec, lengths)

    def _do(self, work: Callable[..., object], *operands: Any) -> None:
        self._device.run(partial(work, *operands))

    def _over(self) -> Testable | None:
        return self._device.done()

    def _fetch_length(self) -> Testable | None:
        return self._mirror.fetch()
