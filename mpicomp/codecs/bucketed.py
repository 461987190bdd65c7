"""What codecs with numbers per bucket share: where those lie in a payload, and how norms are made.

A bucket is `bucket` elements counted from the start of the vector, so pieces begin where buckets do; the last bucket
may be short. Payload: the buckets' numbers as float32, one kind after the other, zeros up to a multiple of 8 bytes,
then words of 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, check_size
from mpicomp.codecs.options import MOST_ELEMENTS, integer
from mpicomp.kernels.cpu import bucketed as kernels
from mpicomp.kernels.cpu.sign import all_finite

Norm = Literal["l2", "l1", "linf"]
FLOAT32_MAX = float(np.finfo(np.float32).max)
_SIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}


def count(n: int, bucket: int) -> int:
    """Buckets of `n` elements."""
    return -(-n // bucket)


def lengths(n: int, bucket: int) -> NDArray[np.float64]:
    """Elements of each."""
    found = np.full(count(n, bucket), bucket, np.float64)
    if n % bucket:
        found[-1] = n % bucket
    return found


def norms(values: NDArray[Any], bucket: int, norm: Norm) -> NDArray[np.float64]:
    """Norm of each bucket of float32 or float64 values; NaN or infinity where one of those is.

    Squares are summed in float64: of float64 values that are far beyond float32, infinity.
    """
    found = np.empty(count(values.size, bucket), np.float64)
    if norm == "linf":
        kind = _SIGNED[values.itemsize]
        bits = np.empty(found.size, kind)
        kernels.largest(values.view(kind), kind.type(np.iinfo(kind).max), bucket, bits)
        return bits.view(values.dtype).astype(np.float64)
    kernels.norms(values, bucket, kernels.L2 if norm == "l2" else kernels.L1, found)
    return np.sqrt(found) if norm == "l2" else found


def to_float32(numbers: NDArray[np.float64], values: NDArray[Any]) -> NDArray[np.float32]:
    """What was made of values, rounded once; where it is beyond float32, that type's largest number.

    Raises
    ------
    ValueError
        A value is not finite.
    """
    if not np.isfinite(numbers).all() and not all_finite(values):
        raise ValueError("the values contain NaN or infinity")
    return np.clip(numbers, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def finite(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Numbers as they came, but 0 for those that damage made NaN or infinite."""
    return np.where(np.isfinite(numbers), numbers, np.float32(0))


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
        return self._header(n) + 8 * self.bits * -(-n // 64)

    def _header(self, n: int) -> int:
        return -(-4 * self.numbers * count(n, self.bucket) // 8) * 8

    def _read(self, payload: Bytes, n: int, weight: int) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """Numbers [kinds, buckets] and bit planes [bits, words]; raises ValueError for a wrong size."""
        check_size(self, payload, n, weight)
        of_buckets = count(n, self.bucket)
        numbers = payload[: 4 * self.numbers * of_buckets].view(np.float32).reshape(self.numbers, of_buckets)
        return numbers, payload[self._header(n) :].view(np.uint64).reshape(self.bits, -(-n // 64))

    def _write(self, payload: Bytes, n: int, *kinds: NDArray[np.float32]) -> NDArray[np.uint64]:
        """Put the numbers in their place; returns where the bit planes go."""
        numbers, planes = self._read(payload, n, 1)
        payload[: self._header(n)] = 0
        for row, found in zip(numbers, kinds, strict=True):
            row[:] = found
        return planes
