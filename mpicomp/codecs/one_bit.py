"""One bit per element with a scale, or two means, per bucket.

`OneBit`: sgn(x_i) s, s = ||x||_2 / sqrt(d) or ||x||_1 / d. `TwoMeans`: the mean of the bucket's elements that are 0 or
more, or of those below 0. 0 counts as positive; a bucket of zeros decodes to zeros.

Wire format: the buckets' scales, or means of the upper and then the lower side, as float32 (`mpicomp.codecs.buckets`),
then bits as in `mpicomp.codecs.sign`.

References: DoubleSqueeze (Tang et al., ICML 2019); 1-bit SGD (Seide et al., Interspeech 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw
from mpicomp.codecs.buckets import Bucketed, count, finite, lengths, norms, to_float32
from mpicomp.codecs.options import choice
from mpicomp.kernels.buckets import side_sums, spread
from mpicomp.kernels.sign import pack


def _pack(values: NDArray[Any], planes: NDArray[np.uint64]) -> None:
    zero = values.dtype.type(0)
    if not pack(values, planes[0], False, zero, zero):
        raise ValueError("the values contain NaN or infinity")


@dataclass(frozen=True, slots=True)
class OneBit(Bucketed):
    """Signs times one scale per bucket.

    Parameters
    ----------
    bucket : int
        Elements that share a scale.
    scale : "l2" or "l1"
        "l2" keeps the bucket's length; "l1", the mean of magnitudes, is the scale that errs least.
    """

    scale: Literal["l2", "l1"] = "l2"

    def __post_init__(self) -> None:
        Bucketed.__post_init__(self)
        choice(self, "scale", ("l2", "l1"))

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Nothing is drawn. Raises ValueError if a value is not finite."""
        d = lengths(values.size, self.bucket)
        found = norms(values, self.bucket, self.scale) / (np.sqrt(d) if self.scale == "l2" else d)
        _pack(values, self._write(payload, values.size, to_float32(found, values)))

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write +s or -s for each element; a damaged scale that is not finite counts as 0."""
        (scales,), planes = self._read(payload, values.size, weight)
        above = finite(scales).astype(values.dtype)
        spread(planes[0], above, np.where(above == 0, above, -above), self.bucket, values)


@dataclass(frozen=True, slots=True)
class TwoMeans(Bucketed):
    """Each side's mean.

    Parameters
    ----------
    bucket : int
        Elements that share two means.
    """

    numbers: ClassVar[int] = 2

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Nothing is drawn. Raises ValueError if a value is not finite."""
        of_buckets = count(values.size, self.bucket)
        above, below, n_above = np.empty(of_buckets), np.empty(of_buckets), np.empty(of_buckets, np.int64)
        side_sums(values, self.bucket, above, below, n_above)
        n_below = lengths(values.size, self.bucket) - n_above
        above, below = above / np.maximum(n_above, 1), below / np.maximum(n_below, 1)
        _pack(values, self._write(payload, values.size, to_float32(above, values), to_float32(below, values)))

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write each element's mean; a damaged one that is not finite counts as 0."""
        means, planes = self._read(payload, values.size, weight)
        above, below = finite(means).astype(values.dtype)
        spread(planes[0], above, below, self.bucket, values)
