"""A random part of a vector's elements.

Wire format: 32 bytes of header, then float32 values in ascending order of place, zeros up to the end. The places are
not sent: receivers draw the same bits. The header holds the arguments of the draw, key (two 32-bit words), step, source
(32 bits each), first group of 512 elements, and the number of values (64 bits each), all little-endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from collectives.annotations import Array, Bytes, override
from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Draw, FeedbackCodec, Finite, VariableCodec, check_size, require_finite
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.sign import scratch
from mpicomp.kernels.cpu.sparse import spread_masked
from mpicomp.kernels.streams import GROUP, bernoulli_table, key_schedule

_HEADER = 32


@dataclass(frozen=True, slots=True)
class RandomSparsification(FeedbackCodec, VariableCodec):
    """Sends each value z as z / p with probability p, else 0: unbiased. For float32 and float64 values.

    The number of values differs from payload to payload, so `nbytes` has room for eight standard deviations above n p.
    One payload in 10^14 would have more; then the last elements count as not drawn.

    Parameters
    ----------
    p : float
        Probability of an element, above 0 and at most 1.

    Raises
    ------
    ValueError
        `p` is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, RandomSparsification
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = RandomSparsification(p=0.5), np.array([1, -8, 2, 0, 3, 1, 7, 1], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=1, rank=0))
    True
    >>> codec.decode(payload, values, weight=1)
    >>> values
    array([  2., -16.,   0.,   0.,   0.,   0.,  14.,   0.], dtype=float32)
    """

    p: float = 0.01

    def __post_init__(self) -> None:
        options.number(self, "p", "above 0 and at most 1", lambda p: 0 < p <= 1)

    encodes_on_devices: ClassVar[bool] = True
    fuses = "sent"
    alignment: ClassVar[int] = GROUP  # elements that share a counter of random words

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        mean = n * self.p
        most = min(n, math.ceil(mean + 8 * math.sqrt(mean * (1 - self.p)) + 32))
        return _HEADER + -(-4 * most // 8) * 8

    @override
    def count_used(self, payload: Bytes, n: int) -> int:
        return _HEADER + min(4 * int(payload[24:_HEADER].view(np.uint64)[0]), payload.size - _HEADER)

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        return self._encode(values, payload, draw)[0]

    @override
    def encode_telling(self, values: Array, payload: Bytes, sent: Array, *, draw: Draw) -> Finite:
        finite, words, room = self._encode(values, payload, draw)
        kernels.beside(values).sparse.spread_masked(words, room, sent)
        return finite

    def _encode(self, values: Array, payload: Bytes, draw: Draw) -> tuple[Finite, Array, Array]:
        """Encode; return whether all values are finite, the random words, and a view of the payload's values."""
        check_size(self, payload, len(values), 1)
        on = kernels.beside(values)
        finite = require_finite(on.sign.all_finite(values))
        payload[:] = 0
        header, room = on.arrays.view(payload[:_HEADER], "int64"), on.arrays.view(payload[_HEADER:], "float32")
        (key_0, key_1), step = draw.stream.key(), draw.step & 0xFFFFFFFF
        where = key_0 | key_1 << 32, step | int(draw.source) << 32, draw.offset // GROUP
        for place, number in enumerate(where):
            header[place : place + 1] = number - (number >> 63 << 64)
        words = self._draw_words(values, draw)
        header[3:] = on.sparse.compress_masked(values, words, float(self.p), FLOAT32_MAX, room)
        return finite, words, room

    @override
    def decode(self, payload: Bytes, values: Array, *, weight: int) -> None:
        check_size(self, payload, len(values), weight)
        chosen = payload[_HEADER : self.count_used(payload, len(values))].view(np.float32)
        key_0, key_1, step, source = payload[:16].view(np.uint32).tolist()
        words = self._words(values, (key_0, key_1), payload[16:24].view(np.uint64)[0], step, source)
        spread_masked(words, chosen, values)

    @override
    def decode_drawn(self, payload: Bytes, values: Array, *, draw: Draw) -> None:
        check_size(self, payload, len(values), 1)
        on = kernels.beside(values)
        on.sparse.spread_masked(self._draw_words(values, draw), on.arrays.view(payload[_HEADER:], "float32"), values)

    def _draw_words(self, like: Array, draw: Draw) -> Array:
        return self._words(like, draw.stream.key(), draw.offset // GROUP, draw.step & 0xFFFFFFFF, int(draw.source))

    def _words(self, like: Array, key: tuple[int, int], first: int, step: int, source: int) -> Array:
        """Draw random words for as many elements as `like` has; a bit is 1 with probability p."""
        on = kernels.beside(like)
        words = on.arrays.empty(like, 8 * -(-len(like) // GROUP), "uint64")
        if self.p == 1:
            on.arrays.view(words, "int64")[:] = -1
            return words
        chance = Fraction(self.p)
        table, rest = bernoulli_table(chance.numerator, chance.denominator - chance.numerator)
        counters = np.uint64(first), np.uint64(step), np.uint64(source)
        on.philox.draw_words(key_schedule(*key), *counters, table, rest, scratch(), words)
        return words
