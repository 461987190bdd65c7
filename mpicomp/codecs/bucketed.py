"""What codecs with numbers per bucket share: where those lie in a payload, and how norms are made.

A bucket is `bucket` elements counted from the start of the vector, so pieces begin where buckets do; the last bucket
may be short. Payload: the buckets' numbers as float32, one kind after the other, zeros up to a multiple of 8 bytes,
then words of 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from mpicomp import kernels
from mpicomp.codecs.base import Bytes, check_size
from mpicomp.codecs.options import MOST_ELEMENTS, integer
from mpicomp.kernels.cpu.bucketed import L1, L2, LINF

Norm = Literal["l2", "l1", "linf"]
FLOAT32_MAX = float(np.finfo(np.float32).max)
_KINDS: dict[Norm, int] = {"l2": L2, "l1": L1, "linf": LINF}


def count(n: int, bucket: int) -> int:
    """Buckets of `n` elements."""
    return -(-n // bucket)


def lengths(values: Any, bucket: int) -> Any:
    """Elements of each bucket of values, float64."""
    found = kernels.beside(values).arrays.empty(values, count(len(values), bucket), "float64")
    found[:] = bucket
    if len(values) % bucket:
        found[-1:] = len(values) % bucket
    return found


def norms(values: Any, bucket: int, norm: Norm) -> Any:
    """Norm of each bucket of float32 or float64 values, float64; NaN or infinity where one of those is.

    Squares are summed in float64: of float64 values that are far beyond float32, infinity.
    """
    on = kernels.beside(values)
    found = on.arrays.empty(values, count(len(values), bucket), "float64")
    on.bucketed.norms(values, bucket, kind_of(norm), found)
    return on.arrays.xp.sqrt(found) if norm == "l2" else found


def kind_of(norm: Norm) -> int:
    """What kernels call a norm."""
    return _KINDS[norm]


def all_finite(numbers: Any, values: Any) -> Any:
    """Whether all values are finite, of which the buckets' numbers were made; bool[] on a device."""
    return confirmed(kernels.beside(values).arrays.xp.isfinite(numbers).all(), values)


def confirmed(finite: Any, values: Any) -> Any:
    """Whether all values are finite, given whether the buckets' numbers are; bool[] on a device.

    Where the numbers are finite, all values are. Sums of float64 values may overflow, those of float32 values do not.
    """
    check = kernels.beside(values).sign.all_finite
    if isinstance(values, np.ndarray):
        return bool(finite) or check(values)
    return finite if values.itemsize == 4 else finite | check(values)


def to_float32(numbers: Any) -> Any:
    """Numbers rounded once; where they are beyond float32, that type's largest number."""
    arrays = kernels.beside(numbers).arrays
    return arrays.convert(arrays.xp.clip(numbers, -FLOAT32_MAX, FLOAT32_MAX), "float32")


@lru_cache(maxsize=4096)
def _layout(kinds: int, bits: int, bucket: int, n: int) -> tuple[int, int, int, int]:
    """Buckets, where the numbers end, where the bit planes begin, and words of each plane; ends are in bytes."""
    buckets = count(n, bucket)
    end = 4 * kinds * buckets
    return buckets, end, -(-end // 8) * 8, -(-n // 64)


@dataclass(frozen=True, slots=True)
class Bucketed:
    """Base of codecs with numbers per bucket.

    Parameters
    ----------
    bucket : int
        Elements, 1 to 2^32.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    bucket: int = 4096

    numbers: ClassVar[int] = 1  # per bucket
    encodes_on_devices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        integer(self, "bucket", 1, MOST_ELEMENTS)

    @property
    def bits(self) -> int:
        """Of each element, beside the buckets' numbers."""
        return 1

    @property
    def alignment(self) -> int:
        """Elements; buckets and words of 64 elements both fit."""
        return math.lcm(self.bucket, 64)

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Exact size: the numbers, and `bits` for each element, rounded up to words."""
        *_, start, words = self._layout(n)
        return start + 8 * self.bits * words

    def _read(self, payload: Bytes, n: int, weight: int) -> tuple[Any, Any]:
        """Numbers, float32[kinds, buckets], and bit planes, [bits, words]; raises ValueError for a wrong size."""
        check_size(self, payload, n, weight)
        view, (buckets, end, start, words) = kernels.beside(payload).arrays.view, self._layout(n)
        numbers = view(payload[:end], "float32").reshape(self.numbers, buckets)
        return numbers, view(payload[start:], "uint64").reshape(self.bits, words)

    def _write(self, payload: Bytes, n: int) -> tuple[Any, Any]:
        """Where the numbers and the bit planes go; what lies between them is 0."""
        numbers, planes = self._read(payload, n, 1)
        _, end, start, _ = self._layout(n)
        payload[end:start] = 0
        return numbers, planes

    def _layout(self, n: int) -> tuple[int, int, int, int]:
        return _layout(self.numbers, self.bits, self.bucket, n)
