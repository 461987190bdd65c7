"""A rank's half of a step on a device: the vector and the residual stay there, and its codes are made there."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.devices import Device
from collectives.testable import Testable
from mpicomp.codecs.base import Bytes, Codec, Draw
from mpicomp.feedback.error_feedback import FeedbackEncoder
from mpicomp.feedback.on_device import Mirror, OnDevice


class Flag:
    """Whether all was well at a step, as kernels find out on a device."""

    def __init__(self, device: Device) -> None:
        self._device, self._mirror = device, Mirror(device, device.zeros(1, "uint8"))

    def __bool__(self) -> bool:
        return bool(self._mirror.here[0])

    def hoist(self) -> None:
        """Begin another step."""
        self._device.run(partial(self._mirror.there.fill_, 1))

    def lower_unless(self, well: Any) -> None:
        """Take note of a bool[] on the device, as one of its kernels."""
        self._mirror.there.mul_(well)

    def fetch(self) -> Testable | None:
        """Have it copied to the host, whose value is that of the last copy that has ended."""
        return self._mirror.fetch()


def on_devices(codec: Codec) -> Any:
    """What a codec is on a device, which does no entropy coding: `to_fixed` and `from_fixed` lead there and back."""
    return codec if getattr(codec, "coding", "fixed") == "fixed" else codec.fixed  # type: ignore[attr-defined]


class DeviceEncoder(OnDevice, FeedbackEncoder):
    """Encodes a rank's pieces on a device; parameters, behind the device, as in `FeedbackEncoder`.

    Attributes
    ----------
    residual : tensor[n] or [0]
        On the device.
    failed : bool
        Something was not finite at this step; known once the payloads have been copied to the host.
    """

    def __init__(self, device: Device, codec: Codec, *about: Any) -> None:
        self._device, self._well = device, Flag(device)
        FeedbackEncoder.__init__(self, on_devices(codec), *about)

    def _memory(self, longest: int, dtype: np.dtype[Any]) -> None:
        """Nothing: the device's memory for a piece is taken when its kernels are launched, in their order."""

    @property
    def failed(self) -> bool:
        """See the attributes."""
        return not self._well

    def begin(self, step: int) -> None:
        """See `FeedbackEncoder`."""
        super().begin(step)
        self._well.hoist()

    def encode(self, part: Any, cut: range, payload: Any) -> None:
        """See `FeedbackEncoder`; all are on the device, and whether all is well is copied before the payload."""
        self._device.run(partial(self._encode_or_clear, part, cut, payload))
        self._well.fetch()

    def _encode_or_clear(self, part: Any, cut: range, payload: Any) -> None:
        well = self._encode(part, cut, payload)
        payload.mul_(well)  # bytes of zeros are zeros in every code: no owner is to fail because of this rank
        self._well.lower_unless(well)

    def _two(self, part: Any) -> tuple[Any, Any]:
        return part.new_empty(len(part)), part.new_empty(len(part))

    def _try(self, encode: Any, values: Any, payload: Bytes, draw: Draw) -> Any:
        return encode()

    def saved(self) -> NDArray[Any]:
        """See `FeedbackEncoder`; waits for the device."""
        return self._to_host(self.residual)

    def restore(self, residual: NDArray[Any]) -> None:
        """See `FeedbackEncoder`; waits for the device."""
        self._overwrite(self.residual, residual)
