"""One bit per element: the sign, and Marsit's unbiased merge of signs.

Wire format: element i is bit i mod 64 of the little-endian 64-bit word i div 64; 1 is positive; the last word is padded
with zeros. Merging an aggregate of `a` ranks into one of `b` takes each bit from the incoming one with probability
a / (a + b), by random words that depend on neither: the result is the sign of a uniformly random rank.

Reference: Marsit (arXiv 2204.06787), section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.kernels.cpu.philox import draw_words, merge_words
from mpicomp.kernels.cpu.sign import BLOCK, pack, unpack
from mpicomp.kernels.streams import GROUP, TILE, bernoulli_table

UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_SCRATCH = 24 * TILE


def scratch() -> NDArray[np.uint64]:
    """Working memory of `mix`, 12 KiB."""
    return np.empty(_SCRATCH, np.uint64)


def mix_words(
    schedule: NDArray[np.uint64],
    draw_at: tuple[int, np.uint64, np.uint64],
    weights: tuple[int, int],
    work: NDArray[np.uint64],
    out: NDArray[np.uint64],
) -> None:
    """Random words of which a bit is 1 with probability incoming / (incoming + held).

    schedule : uint64[56], the stream's. draw_at : first element (a multiple of 512), step, source. weights : incoming,
    held. work : `scratch()`. out : uint64, a multiple of 8 long, overwritten.
    """
    table, rest = bernoulli_table(*weights)
    draw_words(schedule, np.uint64(draw_at[0] // GROUP), draw_at[1], draw_at[2], table, rest, work, out)


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign of float32 or float64 values; decodes to +-1."""

    @property
    def alignment(self) -> int:
        """Elements; blocks of sums and groups of random words both fit."""
        return BLOCK

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Eight bytes per 64 elements, whatever the weight."""
        return 8 * -(-n // 64)

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Zeros alternate with the parity of step + index, as there is no residual to correct them.

        Raises
        ------
        ValueError
            A value is not finite.
        """
        check_size(self, payload, values.size, 1)
        kind = values.dtype.type
        # the residual-free rule: bit = parity of (step + index)
        odd_positive = (draw.step + draw.offset) % 2 == 0
        if not pack(values, payload.view(np.uint64), odd_positive, kind(0), np.nextafter(kind(0), kind(1))):
            raise ValueError("the values contain NaN or infinity")

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write +1 or -1 for each element."""
        check_size(self, payload, values.size, weight)
        words = UNSIGNED[values.itemsize]
        one, minus = np.array([1, -1], values.dtype).view(words)
        unpack(payload.view(np.uint64), one, minus, False, values.view(words))

    def merge(
        self, held: Bytes, incoming: Bytes, n: int, *, held_weight: int, incoming_weight: int, draw: Draw
    ) -> None:
        """Take each bit from `incoming` with probability incoming_weight / (incoming_weight + held_weight)."""
        check_size(self, held, n, held_weight)
        check_size(self, incoming, n, incoming_weight)
        words = np.empty(8 * -(-n // GROUP), np.uint64)
        at = (draw.offset, np.uint64(draw.step & 0xFFFFFFFF), draw.source)
        mix_words(draw.stream.schedule(), at, (incoming_weight, held_weight), scratch(), words)
        merge_words(words[: held.size // 8], incoming.view(np.uint64), held.view(np.uint64))
