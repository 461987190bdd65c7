"""How many ranks are positive: the count of +1, in as many bits as it needs.

A count of `weight` ranks lies in 0 .. weight and takes ceil(log2(weight + 1)) bits ("bit-length expansion"). Adding
counts loses nothing, so the result does not depend on who is added to whom in which order.

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
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.codecs.sign import Sign
from mpicomp.kernels.streams import BLOCK

AddCounts = Callable[[NDArray[np.uint64], int, NDArray[np.uint64], int, int, int], None]


def planes_of(weight: int) -> int:
    """Bits of a count of `weight` ranks."""
    return weight.bit_length()


@lru_cache(maxsize=256)
def _table(weight: int, dtype: np.dtype[Any]) -> tuple[Any, NDArray[Any], Any]:
    """The kernel that makes values of counts, and its 2, 4, 8, ... and -weight."""
    planes, cpu = planes_of(weight), kernels.of("cpu")
    few = planes <= cpu.vote_counts.FEW_PLANES
    kernel, kind = (cpu.vote_counts.few_values, np.int8) if few else (cpu.vote_counts.many_values, dtype.type)
    return kernel, cpu.planes.powers_of_two(planes + 1, kind)[1:], kind(-weight)


def write_values(
    counts: NDArray[np.uint64],
    words: int,
    weight: int,
    factors: NDArray[Any],
    where: tuple[NDArray[np.int64], NDArray[np.int64], int, int, int],
    streaming: bool,
    out: NDArray[Any],
) -> None:
    """out = (2 count - weight) * the factor of an element's stretch, and 0 between stretches.

    counts : uint64, planes of so many words each. factors : like out, one per stretch. where : the stretches' starts
    and stops, in elements of the vector, the element that `out` begins with, the first stretch that reaches into it and
    the one behind the last. streaming : store past the caches; `out` must then start at a multiple of 32 bytes. out :
    float32 or float64, overwritten.
    """
    kernel, powers, lowest = _table(weight, out.dtype)
    kernel(counts, powers.size, words, powers, lowest, factors, *where, streaming, out)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of positive values; decodes to the mean of the signs."""

    alignment: ClassVar[int] = BLOCK  # blocks of sums and groups of random words both fit

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Eight bytes per 64 elements and bit of a count."""
        return 8 * -(-n // 64) * planes_of(weight)

    def bind(self, device: str) -> AddCounts:
        """The merge on a device: adds counts, of so many planes, to counts that are held.

        Its arguments: the incoming counts and their planes, the held counts and their planes, the planes of the sum,
        and the words of a plane.
        """
        add_counts: AddCounts = kernels.of(device).vote_counts.add_counts
        return add_counts

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Write one rank's counts, 0 or 1. Zeros alternate with the parity of step + index.

        Raises ValueError if a value is not finite.
        """
        Sign().encode(values, payload, draw=draw)

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write (2 count - weight) / weight: -1 to 1, and where counts are damaged, below 4."""
        check_size(self, payload, values.size, weight)
        factors, where = np.array([1 / weight], values.dtype), (np.array([0]), np.array([values.size]), 0, 0, 1)
        write_values(payload.view(np.uint64), -(-values.size // 64), weight, factors, where, False, values)

    def merge(
        self, held: Bytes, incoming: Bytes, n: int, *, held_weight: int, incoming_weight: int, draw: Draw
    ) -> None:
        """Add the counts in `incoming` to those that `held`, of the size of their sum, begins with."""
        weight = held_weight + incoming_weight
        check_size(self, held, n, weight)
        check_size(self, incoming, n, incoming_weight)
        self.bind("cpu")(
            incoming.view(np.uint64), planes_of(incoming_weight), held.view(np.uint64), planes_of(held_weight),
            planes_of(weight), -(-n // 64),
        )  # fmt: skip
