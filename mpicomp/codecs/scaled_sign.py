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
from typing import Any, ClassVar, Literal

import numpy as np

from mpicomp import kernels
from mpicomp.codecs.base import Bytes, Draw, checked
from mpicomp.codecs.bucketed import Bucketed, count, kind_of, lengths, norms, to_float32
from mpicomp.codecs.options import choice

_ZEROS = {4: (np.float32(0), np.float32(0)), 8: (np.float64(0), np.float64(0))}  # the signs of zeros do not alternate


@dataclass(frozen=True, slots=True)
class _Sides(Bucketed):
    """Base of codecs of which a payload has, for each bucket, what its upper and its lower side decode to."""

    @abstractmethod
    def _numbers(self, values: Any) -> tuple[Any, ...]:
        """What is sent of the buckets, float32."""

    @abstractmethod
    def _keep(self, values: Any, residual: Any, left: Any, bits: Any, numbers: Any, /) -> Any:
        """Overwrite the last three; False if a sum is not finite."""

    def encode(self, values: Any, payload: Bytes, *, draw: Draw) -> Any:
        """Nothing is drawn. Raises ValueError if a value is not finite."""
        numbers, planes = self._write(payload, len(values))
        for kind, found in zip(numbers, self._numbers(values), strict=True):
            kind[:] = found
        return checked(kernels.beside(values).sign.pack(values, planes[0], False, *_ZEROS[values.itemsize]))

    def encode_keeping(self, values: Any, residual: Any, payload: Bytes, left: Any) -> Any:
        """See `Extended`. Raises ValueError if a sum is not finite."""
        numbers, planes = self._write(payload, len(left))
        return checked(self._keep(values, residual, left, planes[0], numbers))

    def decode(self, payload: Bytes, values: Any, *, weight: int) -> None:
        """Write its side's number for each element; a damaged one that is not finite counts as 0."""
        self._spread(payload, values, weight, adding=False)

    def add(self, payload: Bytes, sums: Any) -> None:
        """Add what `decode` would write to `sums`. Raises ValueError for a wrong size."""
        self._spread(payload, sums, 1, adding=True)

    def _spread(self, payload: Bytes, values: Any, weight: int, adding: bool) -> None:
        numbers, planes = self._read(payload, len(values), weight)
        kernels.beside(values).bucketed.spread(planes[0], numbers, self.bucket, values, adding)


@dataclass(frozen=True, slots=True)
class OneBit(_Sides):
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

    def _numbers(self, values: Any) -> tuple[Any, ...]:
        d, sqrt = lengths(values, self.bucket), kernels.beside(values).arrays.xp.sqrt
        found = norms(values, self.bucket, self.scale) / (sqrt(d) if self.scale == "l2" else d)
        return (to_float32(found),)

    def _keep(self, *arrays: Any) -> Any:
        return kernels.beside(arrays[0]).bucketed.keep_signs(*arrays, self.bucket, kind_of(self.scale))


@dataclass(frozen=True, slots=True)
class TwoMeans(_Sides):
    """Each side's mean.

    Parameters
    ----------
    bucket : int
        Elements that share two means.
    """

    numbers: ClassVar[int] = 2

    def _numbers(self, values: Any) -> tuple[Any, ...]:
        on, of_buckets = kernels.beside(values), count(len(values), self.bucket)
        above, below, n_above = (on.arrays.empty(values, of_buckets, kind) for kind in ("float64", "float64", "int64"))
        on.bucketed.side_sums(values, self.bucket, above, below, n_above)
        n_below, clip = lengths(values, self.bucket) - n_above, on.arrays.xp.clip
        above, below = above / clip(n_above, 1, None), below / clip(n_below, 1, None)
        return to_float32(above), to_float32(below)

    def _keep(self, *arrays: Any) -> Any:
        return kernels.beside(arrays[0]).bucketed.keep_sides(*arrays, self.bucket)
