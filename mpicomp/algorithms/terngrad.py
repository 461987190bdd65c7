"""TernGrad: random codes of -1, 0 or +1, times a scale that all ranks share.

    N = max over ranks of min(||g_m||_inf, clip sigma_m);   q_m = N sgn(g_m) with probability min(|g_m| / N, 1), else 0
    result = mean_m q_m

sigma is the root of the mean square of the bucket. The part that clipping cuts off is lost; without clipping q is
unbiased. Ranks exchange their scales before they encode. All ranks take the maximum of the same received scales, so NaN
cannot make the ranks differ.

Reference: Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from collectives import Communicator
from collectives.annotations import Array, override
from collectives.arrays import after_copy
from collectives.execution.workers import in_parts
from collectives.progress.polling import done
from mpicomp import kernels
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.codecs.base import Codec, Draw
from mpicomp.codecs.bucketed import count
from mpicomp.codecs.options import adopt, integer, number
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.feedback.base import bad_ranks
from mpicomp.feedback.codes import Codes
from mpicomp.feedback.mirror import Mirror
from mpicomp.reducers.all_gather import all_gather, gathered_model
from mpicomp.step import PieceReducer, StepDriver

PART_ELEMENTS = 1 << 21  # part whose scales one worker measures at a time


@dataclass(frozen=True)
class TernGrad(Algorithm):
    """Options of TernGrad.

    Parameters
    ----------
    bucket : int
        Number of elements that share a scale.
    clip : float or None
        Bound of magnitudes in units of sigma; above 0. None: no clipping.
    seed : int
        Seed of the random words; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    bucket: int = 4096
    clip: float | None = 2.5
    seed: int = 0

    def __post_init__(self) -> None:
        adopt(self, self.codec)
        number(self, "clip", "a finite number of sigma above 0", lambda clip: 0 < clip < math.inf, also=(None,))
        integer(self, "seed")

    @property
    def codec(self) -> Quantizer:
        """Codec of the options."""
        return Quantizer(self.bucket, 1, "linf")

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return True

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """No feedback x ternary quantizer with shared scales x all-gather."""
        return all_gather(comm, spec, self.codec, None, self.seed, partial(SharedScaleDriver, self, spec))

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return gathered_model(self.codec, n, piece_bytes)

    def scales(self, values: Array) -> Array:
        """Return the float32 scale of each bucket of a rank's vector; infinity if the bucket is not finite."""
        on = kernels.beside(values)
        scales = on.arrays.empty(values, count(len(values), self.bucket), "float32")
        clip = None if self.clip is None else float(self.clip)
        on.bucketed.clipped_scales(values, self.bucket, clip, scales)
        return scales


class _SharedScales:
    """Quantizer with given scales."""

    def __init__(self, codec: Quantizer, scales: Array) -> None:
        self.codec, self.scales = codec, scales
        self.alignment, self.nbytes, self.decode = codec.alignment, codec.nbytes, codec.decode

    def encode(self, values: Array, payload: Array, *, draw: Draw) -> bool:
        first = draw.offset // self.codec.bucket
        scales = self.scales[first : first + count(len(values), self.codec.bucket)]
        self.codec.encode_scaled(values, scales, payload, draw=draw)
        return True


class SharedScaleDriver(StepDriver):
    """Steps whose ranks agree on the scale of each bucket before they encode."""

    def __init__(
        self, options: TernGrad, spec: VectorSpec, comm: Communicator, feedback: Codes, reducer: PieceReducer
    ) -> None:
        super().__init__(comm, feedback, reducer)
        self._options, self._encoder = options, feedback.encoders["residual"]
        buckets = count(spec.n, options.bucket)
        step = options.bucket * max(1, PART_ELEMENTS // options.bucket)
        self._parts = [range(start, min(spec.n, start + step)) for start in range(0, spec.n, step)]
        self._scale_channel = SideChannel(comm, 0, 4 * buckets)
        self._mine = self._scale_channel.tail.view(np.float32)
        self.can_compare = comm.verifies and self._scale_channel.fits_comparison
        self._mirror = Mirror(feedback.device, feedback.device.zeros(buckets, "float32"))

    @override
    def compares(self, step: int) -> bool:
        return self.can_compare  # the scales come first

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        if call.spec.n:
            yield from self.announce(call)
            yield from super().steps(call)

    @override
    def announce(self, call: VectorCall) -> Iterator[bool]:
        yield from self._measure(call)
        channel = self._scale_channel
        channel.compare_with(call.compare)
        yield from channel.swap(call, call.traffic)
        everyones = np.stack([tail.view(np.float32) for tail in channel.tails])
        bad = bad_ranks(~np.isfinite(everyones).all(axis=1))
        if bad:
            raise call.non_finite(bad)
        self._mirror.send(everyones.max(axis=0, initial=0))
        self._encoder.codec = cast(Codec, _SharedScales(self._options.codec, self._mirror.there))

    def _measure(self, call: VectorCall) -> Iterator[bool]:
        """Overwrite this rank's scales."""
        traffic, values = call.traffic, call.values
        start = traffic.clock()
        if self.feedback.on_host and len(self._parts) > 1:
            measure = partial(self._measure_part, values)
            yield from in_parts(call, traffic, "seconds_encoding", measure, self._parts, call.group.workers)
            traffic.seconds_total += traffic.clock() - start
            return
        self.feedback.launch(self._measure_whole, values)
        measured = after_copy(self._mirror.fetch(), self._take_scales)
        spent = traffic.clock() - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        yield from done(call, measured)

    def _measure_part(self, values: Array, part: range) -> None:
        """Overwrite the scales of whole buckets."""
        scales = self._options.scales(values[part.start : part.stop])
        first = part.start // self._options.bucket
        self._mine[first : first + len(scales)] = scales

    def _measure_whole(self, values: Array) -> None:
        self._mirror.there[:] = self._options.scales(values)

    def _take_scales(self) -> None:
        self._mine[:] = self._mirror.here
