"""TernGrad: random codes of -1, 0 or +1, times a scale that all ranks share.

    N = max over ranks of min(||g_m||_inf, clip sigma_m);   q_m = N sgn(g_m) with probability min(|g_m| / N, 1), else 0
    result = mean_m q_m

sigma is the root of the mean square of the bucket. The part that clipping cuts off is lost; without clipping q is
unbiased. Ranks exchange their scales before they encode. All ranks take the maximum of the same received scales, so NaN
cannot make the ranks differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from collectives.annotations import Array, override
from mpicomp import kernels
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.base import Draw
from mpicomp.codecs.bucketed import count
from mpicomp.codecs.options import adopt, integer, number
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.feedback.codes import SharedScales
from mpicomp.reducers.families import GatheringMethod


@method(
    "terngrad",
    Learned(Grade.COMPARED, "ended 2 % above dense's loss in one of two problems"),
    forms=({}, {"bucket": 100, "clip": None}),
)
@dataclass(frozen=True)
class TernGrad(GatheringMethod):
    """Options of TernGrad: random codes of -1, 0 or +1, times a scale that all ranks share.

    Parameters
    ----------
    bucket : int
        Number of elements that share a scale.
    clip : float or None
        Bound of magnitudes in units of sigma; above 0. None: no clipping.
    seed : int
        Seed of the random words; equal on all ranks.
    correlated : bool
        As in `QSGD`.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NIPS 2017
    (arXiv 1705.07878).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     terngrad = mpicomp.TernGrad(clip=None).start(comm, 4)
    ...     return terngrad.aggregate(np.array([1.0, -1.0, 0.0, 0.5], np.float32))
    >>> mean = mpicomp.run_local(2, step)[0]
    >>> mean[:3].tolist(), float(mean[3]) in (0.0, 0.5, 1.0)
    ([1.0, -1.0, 0.0], True)
    """

    bucket: int = 4096
    clip: float | None = 2.5
    seed: int = 0
    correlated: bool = False

    def __post_init__(self) -> None:
        adopt(self, self.codec)
        number(self, "clip", "a finite number of sigma above 0", lambda clip: 0 < clip < math.inf, also=(None,))
        integer(self, "seed")

    @property
    def codec(self) -> Quantizer:
        """Codec of the options."""
        return Quantizer(self.bucket, 1, "linf", correlated=self.correlated)

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> Quantizer:
        return self.codec

    @property
    @override
    def shared_scales(self) -> SharedScales:
        return SharedScales(self.bucket, self.scales, partial(_Scaled, self.codec))

    def scales(self, values: Array) -> Array:
        """Return the float32 scale of each bucket of a rank's vector; infinity if the bucket is not finite."""
        on = kernels.beside(values)
        scales = on.arrays.empty(values, count(len(values), self.bucket), "float32")
        clip = None if self.clip is None else float(self.clip)
        on.bucketed.clipped_scales(values, self.bucket, clip, scales)
        return scales


class _Scaled:
    """Quantizer with given scales."""

    def __init__(self, codec: Quantizer, scales: Array) -> None:
        self.codec, self.scales = codec, scales
        self.alignment, self.nbytes, self.decode = codec.alignment, codec.nbytes, codec.decode
        self.encodes_on_devices, self.out_of_range = codec.encodes_on_devices, codec.out_of_range

    def encode(self, values: Array, payload: Array, *, draw: Draw) -> bool:
        first = draw.offset // self.codec.bucket
        scales = self.scales[first : first + count(len(values), self.codec.bucket)]
        self.codec.encode_scaled(values, scales, payload, draw=draw)
        return True
