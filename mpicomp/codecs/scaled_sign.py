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
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw
from mpicomp.codecs.bucketed import Bucketed, count, finite, lengths, norms, to_float32
from mpicomp.codecs.options import choice
from mpicomp.kernels.cpu.bucketed import L1, L2, keep_sides, keep_signs, side_sums, spread
from mpicomp.kernels.cpu.sign import pack

_NOT_FINITE = "the values contain NaN or infinity"


@dataclass(frozen=True, slots=True)
class _Sides(Bucketed):
    """Base of codecs of which a payload has, for each bucket, what its upper and its lower side decode to."""

    @abstractmethod
    def _numbers(self, values: NDArray[Any]) -> tuple[NDArray[np.float32], ...]:
        """What is sent of the buckets, all finite; raises ValueError if a value is not."""

    @abstractmethod
    def _keep(
        self,
        values: NDArray[Any],
        residual: NDArray[Any],
        left: NDArray[Any],
        bits: NDArray[np.uint64],
        numbers: NDArray[np.float32],
        /,
    ) -> bool:
        """Overwrite the last three; False if a sum is not finite."""

    @staticmethod
    @abstractmethod
    def _sides(numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """What the sides decode to, from finite numbers [kinds, buckets]."""

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Nothing is drawn. Raises ValueError if a value is not finite."""
        planes = self._write(payload, values.size, *self._numbers(values))
        zero = values.dtype.type(0)
        if not pack(values, planes[0], False, zero, zero):
            raise ValueError(_NOT_FINITE)

    def encode_keeping(self, values: NDArray[Any], residual: NDArray[Any], payload: Bytes, left: NDArray[Any]) -> None:
        """See `Extended`. Raises ValueError if a sum is not finite."""
        numbers, planes = self._read(payload, left.size, 1)
        payload[: self._header(left.size)] = 0
        if not self._keep(values, residual, left, planes[0], numbers):
            raise ValueError(_NOT_FINITE)

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write its side's number for each element; a damaged one that is not finite counts as 0."""
        self._spread(payload, values, weight, adding=False)

    def add(self, payload: Bytes, sums: NDArray[Any]) -> None:
        """Add what `decode` would write to `sums`. Raises ValueError for a wrong size."""
        self._spread(payload, sums, 1, adding=True)

    def _spread(self, payload: Bytes, values: NDArray[Any], weight: int, adding: bool) -> None:
        numbers, planes = self._read(payload, values.size, weight)
        spread(planes[0], *self._sides(finite(numbers).astype(values.dtype)), self.bucket, values, adding)


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

    def _numbers(self, values: NDArray[Any]) -> tuple[NDArray[np.float32], ...]:
        d = lengths(values.size, self.bucket)
        found = norms(values, self.bucket, self.scale) / (np.sqrt(d) if self.scale == "l2" else d)
        return (to_float32(found, values),)

    def _keep(self, *arrays: NDArray[Any]) -> bool:
        return bool(keep_signs(*arrays, self.bucket, L2 if self.scale == "l2" else L1))

    @staticmethod
    def _sides(numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        above = numbers[0]
        return above, np.where(above == 0, above, -above)


@dataclass(frozen=True, slots=True)
class TwoMeans(_Sides):
    """Each side's mean.

    Parameters
    ----------
    bucket : int
        Elements that share two means.
    """

    numbers: ClassVar[int] = 2

    def _numbers(self, values: NDArray[Any]) -> tuple[NDArray[np.float32], ...]:
        of_buckets = count(values.size, self.bucket)
        above, below, n_above = np.empty(of_buckets), np.empty(of_buckets), np.empty(of_buckets, np.int64)
        side_sums(values, self.bucket, above, below, n_above)
        n_below = lengths(values.size, self.bucket) - n_above
        above, below = above / np.maximum(n_above, 1), below / np.maximum(n_below, 1)
        return to_float32(above, values), to_float32(below, values)

    def _keep(self, *arrays: NDArray[Any]) -> bool:
        return bool(keep_sides(*arrays, self.bucket))

    @staticmethod
    def _sides(numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        above, below = numbers
        return above, below
