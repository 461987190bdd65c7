"""Base of codecs with numbers per bucket: the layout of their payloads, and norms.

A bucket is `bucket` elements counted from the start of the vector, so pieces begin where buckets do; the last bucket
may be short. Wire format: the buckets' numbers as float32, one kind after the other, zeros up to a multiple of 8 bytes,
then words of 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from collectives.annotations import Array, Bytes, override
from mpicomp import kernels
from mpicomp.codecs.base import Codec, Finite, check_size
from mpicomp.codecs.options import MOST_ELEMENTS, integer
from mpicomp.kernels.cpu.bucketed import L1, L2, LINF

Norm = Literal["l2", "l1", "linf"]
FLOAT32_MAX = float(np.finfo(np.float32).max)
_KINDS: dict[Norm, int] = {"l2": L2, "l1": L1, "linf": LINF}


def count(n: int, bucket: int) -> int:
    """Return the number of buckets of `n` elements."""
    return -(-n // bucket)


def lengths(values: Array, bucket: int) -> Array:
    """Return the elements of each bucket, float64."""
    found = kernels.beside(values).arrays.empty(values, count(len(values), bucket), "float64")
    found[:] = bucket
    if len(values) % bucket:
        found[-1:] = len(values) % bucket
    return found


def norms(values: Array, bucket: int, norm: Norm) -> Array:
    """Return the norm of each bucket of float32 or float64 values, float64; NaN or infinity where a value is."""
    # squares are summed in float64: the norm of float64 values far beyond float32 is infinite
    on = kernels.beside(values)
    found = on.arrays.empty(values, count(len(values), bucket), "float64")
    on.bucketed.norms(values, bucket, kind_of(norm), found)
    return on.arrays.xp.sqrt(found) if norm == "l2" else found


def kind_of(norm: Norm) -> int:
    """Return the kernels' number of a norm."""
    return _KINDS[norm]


def all_finite(numbers: Array, values: Array) -> Finite:
    """Return whether all values are finite, given the numbers computed from their buckets."""
    return confirm_finite(kernels.beside(values).arrays.xp.isfinite(numbers).all(), values)


def confirm_finite(finite: Finite, values: Array) -> Finite:
    """Return whether all values are finite, given whether the buckets' numbers are."""
    # finite numbers have finite values; the reverse holds for float32 values alone, whose sums do not overflow
    check = kernels.beside(values).sign.all_finite
    if isinstance(values, np.ndarray):
        return bool(finite) or check(values)
    return finite if values.itemsize == 4 else finite | check(values)


def to_float32(numbers: Array) -> Array:
    """Round numbers once; those beyond float32 become its largest number."""
    arrays = kernels.beside(numbers).arrays
    return arrays.convert(arrays.xp.clip(numbers, -FLOAT32_MAX, FLOAT32_MAX), "float32")


@lru_cache(maxsize=4096)
def _layout(kinds: int, bits: int, bucket: int, n: int) -> tuple[int, int, int, int]:
    """Return the number of buckets, the byte where numbers end, the byte where planes begin, and words of a plane."""
    buckets = count(n, bucket)
    end = 4 * kinds * buckets
    return buckets, end, -(-end // 8) * 8, -(-n // 64)


@dataclass(frozen=True, slots=True)
class Bucketed(Codec):
    """Base of codecs with numbers per bucket.

    Parameters
    ----------
    bucket : int
        Elements of a bucket, 1 to 2^32.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> from mpicomp.codecs import Bucketed, OneBit
    >>> codec = OneBit(bucket=512)
    >>> isinstance(codec, Bucketed), codec.alignment
    (True, 512)
    >>> codec.nbytes(1024)  # 2 scales of 4 bytes, 16 words of signs
    136
    """

    bucket: int = 4096

    numbers: ClassVar[int] = 1  # of each bucket
    encodes_on_devices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        integer(self, "bucket", 1, MOST_ELEMENTS)

    @property
    def bits(self) -> int:
        """Bits of each element, without the buckets' numbers."""
        return 1

    @property
    @override
    def alignment(self) -> int:
        return math.lcm(self.bucket, 64)

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        *_, start, words = self._layout(n)
        return start + 8 * self.bits * words

    def _read(self, payload: Bytes, n: int, weight: int) -> tuple[Array, Array]:
        """Return views of the numbers, float32[kinds, buckets], and of the bit planes, uint64[bits, words]."""
        check_size(self, payload, n, weight)
        view, (buckets, end, start, words) = kernels.beside(payload).arrays.view, self._layout(n)
        numbers = view(payload[:end], "float32").reshape(self.numbers, buckets)
        return numbers, view(payload[start:], "uint64").reshape(self.bits, words)

    def _read_all(self, payloads: Array, n: int) -> tuple[Array, Array]:
        """Return the views of `_read` of several payloads: [payloads, kinds, buckets] and [payloads, bits, words]."""
        check_size(self, payloads[0], n, 1)
        view, (buckets, end, start, words) = kernels.beside(payloads).arrays.view, self._layout(n)
        numbers, planes = view(payloads[:, :end], "float32"), view(payloads[:, start:], "uint64")
        return numbers.reshape(len(payloads), self.numbers, buckets), planes.reshape(len(payloads), self.bits, words)

    def _write(self, payload: Bytes, n: int) -> tuple[Array, Array]:
        """Clear the gap behind the numbers, and return the views of `_read` to write to."""
        numbers, planes = self._read(payload, n, 1)
        _, end, start, _ = self._layout(n)
        if end < start:
            payload[end:start] = 0
        return numbers, planes

    def _layout(self, n: int) -> tuple[int, int, int, int]:
        return _layout(self.numbers, self.bits, self.bucket, n)
