"""What reducers of codes do on a device: encode there, and decode there what has come.

Payloads alone cross to the host and back, through pinned memory that they are sent from. Entropy coding is left to the
host: fixed codes cross. A rank that owns a part of the vector takes its mean on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from collectives.devices import Device, Landed, named
from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.aggregator.parts import VectorSpec
from mpicomp.codecs.base import Codec
from mpicomp.feedback.error_feedback import FeedbackEncoder
from mpicomp.feedback.error_feedback_device import DeviceEncoder, Flag, on_devices
from mpicomp.feedback.on_device import Mirror
from mpicomp.reducers.coded import Decode, Payloads, Results, buffers

ALIGNMENT = 64  # bytes that each payload begins at a multiple of


class DevicePayloads(Payloads):
    """Payloads of pieces on a device, and on the host; parameters, but for the device, as in `Payloads`."""

    def __init__(self, device: Device, codec: Codec, lengths: Sequence[int]) -> None:
        self.codec, self._lengths = on_devices(codec), lengths
        sizes = [self.codec.nbytes(n) for n in lengths]
        starts = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        self._spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._mirror = Mirror(device, device.zeros(self._spans[-1].stop if sizes else 0, "uint8"))
        self.there = [self._mirror.there[span] for span in self._spans]
        self._crossing = self.host = [self._mirror.here[span] for span in self._spans]
        self._recoder: Any = None if self.codec is codec else codec
        if self._recoder is not None:
            self.host = buffers([codec.nbytes(n) for n in lengths])

    def fetch(self, piece: int) -> Testable | None:
        """See `Payloads`."""
        copy = self._mirror.fetch(self._spans[piece])
        return copy if self._recoder is None else Landed(copy, partial(self._recode, piece))

    def _recode(self, piece: int) -> None:
        self._recoder.from_fixed(self._crossing[piece], self._lengths[piece], self.host[piece])

    def deliver(self, piece: int) -> None:
        """See `Payloads`."""
        if self._recoder is not None:
            self._recoder.to_fixed(self.host[piece], self._lengths[piece], self._crossing[piece])
        self._mirror.deliver(self._spans[piece])


class DeviceResults(Results):
    """Results of pieces on a device; parameters, but for the device, as in `Results`."""

    def __init__(self, device: Device, spec: VectorSpec, longest: int) -> None:
        super().__init__(spec, longest)
        self._device, self._well = device, Flag(device)
        self._codes, self._wide = (device.zeros(0, kind).dtype for kind in ("int16", "float32"))

    @property
    def finite(self) -> bool:
        """See `Results`; known once all pieces are there."""
        return bool(self._well)

    def begin(self, out: Any) -> None:
        """See `Results`."""
        super().begin(out)
        if out is not None:
            self._well.hoist()

    def write(self, cut: range, decode: Decode) -> Testable | None:
        """See `Results`."""
        self._device.run(partial(self._write, self._out[cut.start : cut.stop], decode))  # type: ignore[index]
        return self._well.fetch()

    def _write(self, out: Any, decode: Decode) -> None:
        on, n = kernels.of("cuda"), len(out)
        part = out.new_empty(n, dtype=self._wide) if self._narrow else out
        decode(part, part.new_empty(n))
        if self._narrow:
            self._well.lower_unless(on.sixteen_bits.narrow(part, self._dtype == "bfloat16", out.view(self._codes)))
        else:
            self._well.lower_unless(on.sign.all_finite(out))


class Place(NamedTuple):
    """What makes a rank's half of a step where its vectors are: see the classes of these names."""

    encoder: Callable[..., FeedbackEncoder]
    payloads: Callable[..., Payloads]
    results: Callable[..., Results]


def place_of(spec: VectorSpec) -> Place:
    """Where vectors are encoded, and results decoded."""
    if spec.device == "cpu":
        return Place(FeedbackEncoder, Payloads, Results)
    device = named(spec.device)
    return Place(partial(DeviceEncoder, device), partial(DevicePayloads, device), partial(DeviceResults, device))
