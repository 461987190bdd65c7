"""Counts of the ranks whose value is positive, in as few bits as the number of ranks needs.

A count of `weight` ranks lies in 0 .. weight and takes ceil(log2(weight + 1)) bits ("bit-length expansion"). Adding
counts is exact, so the result does not depend on the order of the additions.

Wire format: bit planes. Plane j holds bit j of every count, element i in bit i mod 64 of the little-endian 64-bit word
i div 64; the last word is padded with zeros. Planes follow each other, the lowest first. A single rank's counts are
its packed signs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from collectives.annotations import AnyArray, Bytes, FloatArray, Indices, Words, override
from mpicomp import kernels
from mpicomp.codecs.base import Draw, Mergeable, check_size
from mpicomp.codecs.sign import Sign
from mpicomp.kernels.streams import BLOCK


def planes_of(weight: int) -> int:
    """Return the bits of a count of `weight` ranks."""
    return weight.bit_length()


@lru_cache(maxsize=256)
def _table(weight: int, dtype: np.dtype[Any]) -> tuple[Callable[..., None], AnyArray, np.generic]:
    """Return the kernel that turns counts into values, and its arguments 2, 4, 8, ... and -weight."""
    planes, cpu = planes_of(weight), kernels.of("cpu")
    few = planes <= cpu.vote_counts.FEW_PLANES
    kernel, kind = (cpu.vote_counts.few_values, np.int8) if few else (cpu.vote_counts.many_values, dtype.type)
    return kernel, cpu.planes.powers_of_two(planes + 1, kind)[1:], kind(-weight)


def write_values(
    counts: Words,
    words: int,
    weight: int,
    factors: FloatArray,
    where: tuple[Indices, Indices, int, int, int],
    streaming: bool,
    out: FloatArray,
) -> None:
    """Overwrite `out` with (2 count - weight) * the factor of an element's stretch, and 0 between stretches."""
    # where: starts and stops of the stretches, in elements of the vector; the vector's element at out[0]; the first
    # stretch that overlaps `out`, and the one behind the last
    kernel, powers, lowest = _table(weight, out.dtype)
    # streaming stores past the caches: `out` must start at a multiple of 32 bytes
    kernel(counts, powers.size, words, powers, lowest, factors, *where, streaming, out)


@dataclass(frozen=True, slots=True)
class Counts(Mergeable):
    """Sends counts of positive values; decodes to the mean of the signs, (2 count - weight) / weight.

    Zeros have no sign: they alternate with the parity of step + index. Damaged counts decode to less than 4.

    Examples
    --------
    The counts of a sum may take more bits, so `merge` takes the held ones at the beginning of a longer payload:

    >>> import numpy as np
    >>> from mpicomp.codecs import Counts, Draw
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, draw = Counts(), Draw(Stream(0, 0, "example"), step=0, rank=0)
    >>> incoming, held = np.empty(codec.nbytes(3), np.uint8), np.empty(codec.nbytes(3, weight=2), np.uint8)
    >>> codec.encode(np.array([1, -1, 1], np.float32), incoming, draw=draw)
    >>> codec.encode(np.array([1, -1, -1], np.float32), held[: codec.nbytes(3)], draw=draw)
    >>> codec.merge(held, incoming, 3, held_weight=1, incoming_weight=1, draw=draw)
    >>> mean = np.empty(3, np.float32)
    >>> codec.decode(held, mean, weight=2)
    >>> mean
    array([ 1., -1.,  0.], dtype=float32)
    """

    alignment: ClassVar[int] = BLOCK  # blocks of sums and groups of random words both fit

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return 8 * -(-n // 64) * planes_of(weight)

    @override
    def encode(self, values: FloatArray, payload: Bytes, *, draw: Draw) -> None:
        Sign().encode(values, payload, draw=draw)

    @override
    def decode(self, payload: Bytes, values: FloatArray, *, weight: int) -> None:
        check_size(self, payload, values.size, weight)
        factors, where = np.array([1 / weight], values.dtype), (np.array([0]), np.array([values.size]), 0, 0, 1)
        write_values(payload.view(np.uint64), -(-values.size // 64), weight, factors, where, False, values)

    @override
    def merge(
        self, held: Bytes, incoming: Bytes, n: int, *, held_weight: int, incoming_weight: int, draw: Draw
    ) -> None:
        # `held` has the size of the sum, and begins with the counts so far
        weight = held_weight + incoming_weight
        check_size(self, held, n, weight)
        check_size(self, incoming, n, incoming_weight)
        kernels.of("cpu").vote_counts.add_counts(
            incoming.view(np.uint64), planes_of(incoming_weight), held.view(np.uint64), planes_of(held_weight),
            planes_of(weight), -(-n // 64),
        )  # fmt: skip
