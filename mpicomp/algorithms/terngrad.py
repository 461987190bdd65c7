"""TernGrad: signs or nothing, at random, times a scale that all ranks share.

    N = max over ranks of min(||g_m||_inf, clip sigma_m);   q_m = N sgn(g_m) with probability min(|g_m| / N, 1), else 0
    result = mean_m q_m

sigma is the root of the mean square of the bucket. What clipping cuts off is lost; without it q is unbiased. Ranks tell
each other their scales before they encode, and the maximum is taken of what arrived, so NaN cannot make ranks differ.

Reference: Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NIPS 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives import Traffic
from mpicomp.aggregator.nonfinite import error
from mpicomp.codecs.base import Bytes, Codec, Draw
from mpicomp.codecs.bucketed import count, lengths, norms, to_float32
from mpicomp.codecs.options import adopt, integer, number
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.kernels.cpu.sign import all_finite
from mpicomp.reducers.all_gather import AllGatherAggregator, GatheredOptions


class _Shared:
    """A quantizer whose scales are given."""

    def __init__(self, codec: Quantizer, scales: NDArray[np.float32]) -> None:
        self.codec, self.scales = codec, scales
        self.alignment, self.nbytes, self.decode = codec.alignment, codec.nbytes, codec.decode

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        first = draw.offset // self.codec.bucket
        scales = self.scales[first : first + -(-values.size // self.codec.bucket)]
        self.codec.pack(self.codec.codes(values, scales, draw), scales, payload)


class TernGradAggregator(AllGatherAggregator):
    """Shares scales before codes are gathered."""

    algorithm: TernGrad

    def _exchange(self, values: NDArray[Any], traffic: Traffic) -> None:
        comm, start = self.comm, traffic.clock()
        try:
            mine = self.algorithm.scales(values)
        except ValueError:
            if all_finite(values):
                raise
            mine = np.full(count(self.n, self.algorithm.bucket), np.inf, np.float32)  # says so to all
        spent = traffic.clock() - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        everyones = np.zeros((comm.size, mine.size), np.float32)
        request = comm.mpi_comm.Iallgather(mine, everyones)
        comm.wait(request, lambda: f"rank {comm.rank} of {comm.size}: the ranks' scales do not arrive")
        traffic.bytes_sent += mine.nbytes * (comm.size - 1)
        traffic.messages += comm.size - 1
        bad = tuple(int(rank) for rank in np.flatnonzero(~np.isfinite(everyones).all(axis=1)))
        if bad:
            raise error(comm, bad, f"vector {self.vector_id}, step {self.step}")
        self.worker.codec = _Shared(self.algorithm.codec, everyones.max(axis=0, initial=0))
        super()._exchange(values, traffic)


@dataclass(frozen=True)
class TernGrad(GatheredOptions):
    """Options of TernGrad.

    Parameters
    ----------
    bucket : int
        Elements that share a scale.
    clip : float or None
        Magnitudes are cut off at this many sigma; above 0. None: not at all.
    seed : int
        Equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    bucket: int = 4096
    clip: float | None = 2.5
    seed: int = 0

    aggregator: ClassVar[type[AllGatherAggregator]] = TernGradAggregator

    def __post_init__(self) -> None:
        adopt(self, self.codec)
        number(self, "clip", "a finite number of sigma above 0", lambda clip: 0 < clip < math.inf, also=(None,))
        integer(self, "seed")

    @property
    def codec(self) -> Quantizer:
        """Of the options."""
        return Quantizer(self.bucket, 1, "linf")

    def codec_for(self, dtype: str) -> Codec:
        """See `GatheredOptions`."""
        return self.codec

    def scales(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Of one rank's vector, each bucket's."""
        found = norms(values, self.bucket, "linf")
        if self.clip is not None:
            sigma = norms(values, self.bucket, "l2") / np.sqrt(lengths(values.size, self.bucket))
            found = np.minimum(found, self.clip * sigma)
        return to_float32(found, values)
