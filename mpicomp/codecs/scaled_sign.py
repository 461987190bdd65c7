"""One bit per element with a scale, or two means, per bucket.

`OneBit`: sgn(x_i) s, s = ||x||_2 / sqrt(d) or ||x||_1 / d. `TwoMeans`: the mean of the bucket's elements that are 0 or
more, or of those below 0. 0 counts as positive; a bucket of zeros decodes to zeros.

Wire format: the buckets' scales, or means of the upper and then the lower side, as float32 (`mpicomp.codecs.bucketed`),
then bits as in `mpicomp.codecs.sign`.

References: DoubleSqueeze (Tang et al., ICML 2019); 1-bit SGD (Seide et al., Interspeech 2014).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from collectives.annotations import Array, Bytes, override
from mpicomp import kernels
from mpicomp.codecs.base import Draw, FeedbackCodec, Finite, SpreadingCodec, require_finite
from mpicomp.codecs.bucketed import Bucketed, count, kind_of, lengths, norms, to_float32
from mpicomp.codecs.options import choice

_ZEROS = {4: (np.float32(0), np.float32(0)), 8: (np.float64(0), np.float64(0))}  # the signs of zeros do not alternate


@dataclass(frozen=True, slots=True)
class _Sides(Bucketed, FeedbackCodec, SpreadingCodec):
    """Base of codecs that send, for each bucket, the value of its upper and of its lower side."""

    fuses = "residual"

    @abstractmethod
    def _numbers(self, values: Array) -> tuple[Array, ...]:
        """Return the numbers to send for the buckets, float32."""

    @abstractmethod
    def _keep(self, values: Array, residual: Array, left: Array, bits: Array, numbers: Array, /) -> Finite:
        """Overwrite the last three; return False if a sum is not finite."""

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        numbers, planes = self._write(payload, len(values))
        for kind, found in zip(numbers, self._numbers(values), strict=True):
            kind[:] = found
        return require_finite(kernels.beside(values).sign.pack(values, planes[0], False, *_ZEROS[values.itemsize]))

    @override
    def encode_keeping(self, values: Array, residual: Array, payload: Bytes, left: Array, decay: float = 1.0) -> Finite:
        numbers, planes = self._write(payload, len(left))
        return require_finite(self._keep(values, residual, left, planes[0], numbers))

    @override
    def _spread(self, payload: Bytes, out: Array, weight: int, adding: bool) -> None:
        numbers, planes = self._read(payload, len(out), weight)
        kernels.beside(out).bucketed.spread(planes[0], numbers, self.bucket, out, adding)

    @override
    def mean(self, payloads: Array, mean: Array) -> Finite:
        numbers, planes = self._read_all(payloads, len(mean))
        return kernels.beside(mean).bucketed.mean_of_sides(planes[:, 0], numbers, self.bucket, mean)


@dataclass(frozen=True, slots=True)
class OneBit(_Sides):
    """Signs times one scale per bucket.

    Parameters
    ----------
    bucket : int
        Elements that share a scale.
    scale : "l2" or "l1"
        "l2" keeps the bucket's length; "l1", the mean of magnitudes, has the least error.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, OneBit
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = OneBit(scale="l1"), np.array([4.0, -2.0, 1.0, -1.0], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> decoded = np.empty_like(values)
    >>> codec.decode(payload, decoded, weight=1)
    >>> decoded
    array([ 2., -2.,  2., -2.], dtype=float32)

    See Also
    --------
    TwoMeans : a scale for each side of 0
    """

    scale: Literal["l2", "l1"] = "l2"

    def __post_init__(self) -> None:
        Bucketed.__post_init__(self)
        choice(self, "scale", ("l2", "l1"))

    @override
    def _numbers(self, values: Array) -> tuple[Array, ...]:
        d, sqrt = lengths(values, self.bucket), kernels.beside(values).arrays.xp.sqrt
        found = norms(values, self.bucket, self.scale) / (sqrt(d) if self.scale == "l2" else d)
        return (to_float32(found),)

    @override
    def _keep(self, *arrays: Array) -> Finite:
        return kernels.beside(arrays[0]).bucketed.keep_signs(*arrays, self.bucket, kind_of(self.scale))


@dataclass(frozen=True, slots=True)
class TwoMeans(_Sides):
    """Sends the mean of each bucket's elements that are 0 or more, and the mean of the others.

    Parameters
    ----------
    bucket : int
        Elements that share two means.

    Raises
    ------
    ValueError
        `bucket` is out of range.

    References
    ----------
    Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
    DNNs", Interspeech 2014.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, TwoMeans
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = TwoMeans(), np.array([4.0, 0.0, -1.0, -3.0], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> codec.decode(payload, values, weight=1)
    >>> values
    array([ 2.,  2., -2., -2.], dtype=float32)
    """

    numbers: ClassVar[int] = 2

    @override
    def _numbers(self, values: Array) -> tuple[Array, ...]:
        on, of_buckets = kernels.beside(values), count(len(values), self.bucket)
        above, below, n_above = (on.arrays.empty(values, of_buckets, kind) for kind in ("float64", "float64", "int64"))
        on.bucketed.side_sums(values, self.bucket, above, below, n_above)
        n_below, clip = lengths(values, self.bucket) - n_above, on.arrays.xp.clip
        above, below = above / clip(n_above, 1, None), below / clip(n_below, 1, None)
        return to_float32(above), to_float32(below)

    @override
    def _keep(self, *arrays: Array) -> Finite:
        return kernels.beside(arrays[0]).bucketed.keep_sides(*arrays, self.bucket)
