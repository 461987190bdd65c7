"""One bit per element: the sign, and Marsit's unbiased merge of signs.

Wire format: element i is bit i mod 64 of the little-endian 64-bit word i div 64; 1 is positive; the last word is padded
with zeros. Merging an aggregate of `a` ranks into one of `b` takes each bit from the incoming one with probability
a / (a + b), by random words that depend on neither: the result is the sign of a uniformly random rank.

Reference: Marsit (arXiv 2204.06787), section 3.2.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.kernels.streams import BLOCK, GROUP, TILE, Stream, bernoulli_table

UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def scratch() -> NDArray[np.uint64]:
    """Working memory of random words, 12 KiB."""
    return np.empty(24 * TILE, np.uint64)


class _Scratch(threading.local):
    """A thread's working memory of random words."""

    def __init__(self) -> None:
        self.words = scratch()


class SignMerger:
    """`Sign`, bound to kernels and a stream of random words: what reducers call, by several threads at once too.

    Parameters
    ----------
    device_kernels : namespace
        See `mpicomp.kernels.of`.
    stream : Stream
    """

    __slots__ = ("_draw", "_schedule", "_scratch", "merge")

    def __init__(self, device_kernels: SimpleNamespace, stream: Stream) -> None:
        self._draw = device_kernels.philox.draw_words
        self._schedule, self._scratch = stream.schedule(), _Scratch()
        self.merge = device_kernels.philox.merge_words
        """``merge(words, incoming, held)`` replaces the bits of `held` by those of `incoming` where `words` has a 1."""

    def draw(self, first: int, step: int, source: np.uint64, weights: tuple[int, int], out: NDArray[np.uint64]) -> None:
        """Overwrite `out` with words of which a bit is 1 with probability incoming / (incoming + held).

        first : element, a multiple of 512. source : of rank and ordinal. weights : incoming, held. out : uint64, a
        multiple of 8 long; bit i mod 64 of word i div 64 is element first + i's.
        """
        table, rest = bernoulli_table(*weights)
        group, step_word = np.uint64(first // GROUP), np.uint64(step & 0xFFFFFFFF)
        self._draw(self._schedule, group, step_word, source, table, rest, self._scratch.words, out)


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign of float32 or float64 values; decodes to +-1."""

    alignment: ClassVar[int] = BLOCK  # blocks of sums and groups of random words both fit

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Eight bytes per 64 elements, whatever the weight."""
        return 8 * -(-n // 64)

    def bind(self, device: str, stream: Stream) -> SignMerger:
        """The merge on a device, with working memory of its own."""
        return SignMerger(kernels.of(device), stream)

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Zeros alternate with the parity of step + index, as there is no residual to correct them.

        Raises ValueError if a value is not finite.
        """
        check_size(self, payload, values.size, 1)
        kind = values.dtype.type
        # the residual-free rule: bit = parity of (step + index)
        odd_positive = (draw.step + draw.offset) % 2 == 0
        pack = kernels.of("cpu").sign.pack
        if not pack(values, payload.view(np.uint64), odd_positive, kind(0), np.nextafter(kind(0), kind(1))):
            raise ValueError("the values contain NaN or infinity")

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write +1 or -1 for each element."""
        check_size(self, payload, values.size, weight)
        words = UNSIGNED[values.itemsize]
        one, minus = np.array([1, -1], values.dtype).view(words)
        kernels.of("cpu").sign.unpack(payload.view(np.uint64), one, minus, False, values.view(words))

    def merge(
        self, held: Bytes, incoming: Bytes, n: int, *, held_weight: int, incoming_weight: int, draw: Draw
    ) -> None:
        """Take each bit from `incoming` with probability incoming_weight / (incoming_weight + held_weight)."""
        check_size(self, held, n, held_weight)
        check_size(self, incoming, n, incoming_weight)
        words = np.empty(8 * -(-n // GROUP), np.uint64)
        bound = self.bind("cpu", draw.stream)
        bound.draw(draw.offset, draw.step, draw.source, (incoming_weight, held_weight), words)
        bound.merge(words[: held.size // 8], incoming.view(np.uint64), held.view(np.uint64))
