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

from collectives.annotations import Bytes, FloatArray, Words, override
from mpicomp import kernels
from mpicomp.codecs.base import Draw, Mergeable, check_size
from mpicomp.kernels.streams import BLOCK, GROUP, TILE, Stream, bernoulli_table

UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def scratch() -> Words:
    """Return working memory for random words, 12 KiB."""
    return np.empty(24 * TILE, np.uint64)


class DrawScratch(threading.local):
    """Working memory of a thread for random words."""

    def __init__(self) -> None:
        self.words = scratch()


class SignMerger:
    """Merge of signs by the kernels of a device and a stream of random words. Several threads may use it at once."""

    __slots__ = ("_draw", "_schedule", "_scratch", "merge")

    def __init__(self, device_kernels: SimpleNamespace, stream: Stream) -> None:
        self._draw = device_kernels.philox.draw_words
        self._schedule, self._scratch = stream.schedule(), DrawScratch()
        self.merge = device_kernels.philox.merge_words
        """``merge(words, incoming, held)`` replaces the bits of `held` by those of `incoming` where `words` has a 1."""

    def draw(self, first: int, step: int, source: np.uint64, weights: tuple[int, int], out: Words) -> None:
        """Overwrite uint64[8 k] with words whose bits are 1 with probability incoming / (incoming + held)."""
        # bit i mod 64 of word i div 64 belongs to element first + i; `first` is a multiple of 512, `source` the counter
        # word of rank and ordinal
        table, rest = bernoulli_table(*weights)
        group, step_word = np.uint64(first // GROUP), np.uint64(step & 0xFFFFFFFF)
        self._draw(self._schedule, group, step_word, source, table, rest, self._scratch.words, out)


@dataclass(frozen=True, slots=True)
class Sign(Mergeable):
    """Sends the sign of float32 or float64 values; decodes to +-1.

    Zeros have no sign. Without a residual to correct them, they alternate with the parity of step + index.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, Sign
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = Sign(), np.array([4.0, -2.0, 0.0, 0.0], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    >>> decoded = np.empty_like(values)
    >>> codec.decode(payload, decoded, weight=1)
    >>> decoded
    array([ 1., -1., -1.,  1.], dtype=float32)
    """

    alignment: ClassVar[int] = BLOCK  # blocks of sums and groups of random words both fit

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return 8 * -(-n // 64)

    def bind(self, device: str, stream: Stream) -> SignMerger:
        """Return the merge by the kernels of a device, with working memory of its own."""
        return SignMerger(kernels.of(device), stream)

    @override
    def encode(self, values: FloatArray, payload: Bytes, *, draw: Draw) -> None:
        check_size(self, payload, values.size, 1)
        kind = values.dtype.type
        odd_positive = (draw.step + draw.offset) % 2 == 0
        pack = kernels.of("cpu").sign.pack
        if not pack(values, payload.view(np.uint64), odd_positive, kind(0), np.nextafter(kind(0), kind(1))):
            raise ValueError("the values contain NaN or infinity")

    @override
    def decode(self, payload: Bytes, values: FloatArray, *, weight: int) -> None:
        check_size(self, payload, values.size, weight)
        words = UNSIGNED[values.itemsize]
        one, minus = np.array([1, -1], values.dtype).view(words)
        kernels.of("cpu").sign.unpack(payload.view(np.uint64), one, minus, False, values.view(words))

    @override
    def merge(
        self, held: Bytes, incoming: Bytes, n: int, *, held_weight: int, incoming_weight: int, draw: Draw
    ) -> None:
        check_size(self, held, n, held_weight)
        check_size(self, incoming, n, incoming_weight)
        words = np.empty(8 * -(-n // GROUP), np.uint64)
        bound = self.bind("cpu", draw.stream)
        bound.draw(draw.offset, draw.step, draw.source, (incoming_weight, held_weight), words)
        bound.merge(words[: held.size // 8], incoming.view(np.uint64), held.view(np.uint64))
