"""Few elements of a vector: the largest of each chunk, or a random part of all.

`TopK`, wire format: the values that are kept, chunk after chunk, in ascending order of place, as float32 (or float64),
zeros up to a multiple of 8 bytes; then their places within the chunks as bit planes of ceil(log2 chunk) bits
(`mpicomp.kernels.cpu.planes`). The size follows from the number of elements.

`RandomSparsification`, wire format: 32 bytes of header, then float32 values in ascending order of place, zeros up to
the end. Which elements they are is not sent: receivers draw the same bits. The header says from where: key (two 32-bit
words), step, source (32 bits each), first group of 512 elements, number of values (64 bits each), all little-endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Bytes, Draw, check_size, checked
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.sign import scratch
from mpicomp.kernels.cpu.philox import draw_words
from mpicomp.kernels.cpu.planes import powers_of_two
from mpicomp.kernels.cpu.sign import all_finite
from mpicomp.kernels.cpu.sparse import compress_masked, spread_masked
from mpicomp.kernels.streams import GROUP, bernoulli_table, key_schedule

_DEEPEST = 16  # elements of the groups whose maxima are taken
_MASKS: dict[int, Any] = {4: np.uint32(0x7FFFFFFF), 8: np.uint64(0x7FFFFFFFFFFFFFFF)}
_FLOATS = {4: np.float32, 8: np.float64}
_INFINITY = {4: 0x7F800000, 8: 0x7FF0000000000000}
_POWERS = powers_of_two(32, np.uint32)
_HEADER = 32


def kept(n: int, chunk: int, keep: int) -> int:
    """How many elements are kept of `n`: `keep` of each chunk, of a short one of m elements ceil(keep m / chunk)."""
    return n // chunk * keep + -(-(n % chunk * keep) // chunk)


def index_bits(chunk: int) -> int:
    """Bits of a place within a chunk."""
    return (chunk - 1).bit_length()


class Selector:
    """Picks the largest magnitudes of each chunk.

    Parameters
    ----------
    chunk : int
        Elements, 1 to 2^32.
    keep : int
        Kept of each, 1 to `chunk`.
    dtype : dtype
        float32 or float64.
    """

    def __init__(self, chunk: int, keep: int, dtype: Any) -> None:
        self.chunk, self.keep = chunk, keep
        itemsize = np.dtype(dtype).itemsize
        self._mask, self._infinity = _MASKS[itemsize], _INFINITY[itemsize]
        if keep == 1:
            return
        # at least twice as many groups as elements to be kept: then few others reach the bound
        self._depth = max(1, min(_DEEPEST, chunk // (2 * keep)))
        sizes = self._mask.dtype
        self._maxima = np.empty(chunk // self._depth + 64, sizes)
        reaching = min(chunk, keep * (self._depth + 1))
        self._places, self._sizes = np.empty(reaching, np.uint32), np.empty(reaching + 16, sizes)

    def __call__(self, x: Any, residual: Any, indices: Any, values: Any) -> Any:
        """Overwrite `indices` and `values` with the places within chunks, ascending, and elements of x + residual.

        Returns
        -------
        bool, or bool[] on a device
            Whether all of x + residual is finite.
        """
        if not len(x):
            return True
        on = kernels.beside(x).top_k
        if self.keep == 1:
            most = on.largest(x, residual, self.chunk, self._mask, indices, values)
        else:
            high = np.uint64(1 << (8 * self._mask.nbytes - 2))
            work = self._maxima, self._places, self._sizes  # which devices do not use
            most = on.several(x, residual, self.chunk, self.keep, self._depth, self._mask, high, *work, indices, values)
        return most < self._infinity


def pack_indices(indices: Any, planes: Any) -> None:
    """Places within chunks to bit planes. planes : uint64[bits, ceil(k / 64)], overwritten."""
    kernels.beside(indices).planes.pack_planes(indices, _POWERS, planes)


def unpack_indices(planes: Any, indices: Any) -> None:
    """The opposite of `pack_indices`; places may lie outside their chunks where planes are damaged."""
    kernels.beside(indices).planes.unpack_planes(planes, _POWERS, indices)


@dataclass(frozen=True, slots=True)
class TopK:
    """The largest magnitudes of each chunk; everything else decodes to 0. For float32 and float64 values.

    Parameters
    ----------
    rate : int
        Elements per element that is kept.
    chunk : int, optional
        Elements among which the chunk / rate largest are looked for: a multiple of `rate`. None: `rate`, of which one
        is kept. Longer ones cost more, and find larger magnitudes where these lie close together.
    double : bool
        Send float64; otherwise values are rounded to float32.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    rate: int = 100
    chunk: int | None = None
    double: bool = False

    encodes_on_devices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        options.integer(self, "rate", 1, options.MOST_ELEMENTS)
        options.chunk(self, (self.rate,))
        options.flag(self, "double")

    @property
    def elements(self) -> int:
        """Of a chunk."""
        return self.chunk or self.rate

    @property
    def keep(self) -> int:
        """Of each chunk."""
        return self.elements // self.rate

    @property
    def alignment(self) -> int:
        """Elements; chunks and words of 64 elements both fit."""
        return math.lcm(self.elements, 64)

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Values, rounded up to 8 bytes, and planes of words; whatever the weight."""
        found = kept(n, self.elements, self.keep)
        return self._planes_start(found) + 8 * index_bits(self.elements) * -(-found // 64)

    def _planes_start(self, found: int) -> int:
        return -(-(8 if self.double else 4) * found // 8) * 8

    def encode(self, values: Any, payload: Bytes, *, draw: Draw) -> Any:
        """Nothing is drawn. Raises ValueError if a value is not finite."""
        return self._encode(values, None, payload)[1]

    def encode_keeping(self, values: Any, residual: Any, payload: Bytes, left: Any) -> Any:
        """See `Extended`. Raises ValueError if a value + residual is not finite."""
        on = kernels.beside(values)
        on.error_feedback.compensate(values, residual, None, left)
        indices, finite = self._encode(values, residual, payload)
        places = on.arrays.empty(values, len(indices), "int64")
        on.sparse.expand(indices, self.elements, self.keep, 0, len(values), places)
        left[places] -= self._parts(payload, len(values), 1)[0]
        return finite

    def _encode(self, values: Any, residual: Any, payload: Bytes) -> tuple[Any, Any]:
        """Write the largest of values + residual; returns their places within chunks, and whether all are finite."""
        arrays, (chosen, planes) = kernels.beside(values).arrays, self._parts(payload, len(values), 1)
        indices = arrays.empty(values, len(chosen), "uint32")
        found = arrays.empty(values, len(chosen), values.dtype)
        finite = checked(Selector(self.elements, self.keep, _FLOATS[values.itemsize])(values, residual, indices, found))
        if values.itemsize > chosen.itemsize:
            found = arrays.xp.clip(found, -FLOAT32_MAX, FLOAT32_MAX)
        payload[: self._planes_start(len(chosen))] = 0
        chosen[:] = found
        pack_indices(indices, planes)
        return indices, finite

    def decode(self, payload: Bytes, values: Any, *, weight: int) -> None:
        """Write what was kept, and 0 elsewhere; what damage made NaN or infinite counts as 0."""
        self._spread(payload, values, weight, adding=False)

    def add(self, payload: Bytes, sums: Any) -> None:
        """Add what `decode` would write to `sums`, looking at the elements alone that were kept.

        Raises ValueError for a wrong size.
        """
        self._spread(payload, sums, 1, adding=True)

    def _spread(self, payload: Bytes, out: Any, weight: int, adding: bool) -> None:
        on = kernels.beside(out)
        chosen, planes = self._parts(payload, len(out), weight)
        indices = on.arrays.empty(out, len(chosen), "uint32")
        unpack_indices(planes, indices)
        if out.itemsize < chosen.itemsize:
            chosen = on.arrays.xp.nan_to_num(chosen, nan=0, posinf=0, neginf=0)
            chosen = on.arrays.convert(on.arrays.xp.clip(chosen, -FLOAT32_MAX, FLOAT32_MAX), out.dtype)
        on.sparse.spread_chunks(chosen, indices, self.elements, self.keep, out, adding)

    def _parts(self, payload: Bytes, n: int, weight: int) -> tuple[Any, Any]:
        """Values and planes, in place; raises ValueError for a wrong size."""
        check_size(self, payload, n, weight)
        view, found = kernels.beside(payload).arrays.view, kept(n, self.elements, self.keep)
        chosen = view(payload[: (8 if self.double else 4) * found], "float64" if self.double else "float32")
        planes = view(payload[self._planes_start(found) :], "uint64")
        return chosen, planes.reshape(index_bits(self.elements), -(-found // 64))


@dataclass(frozen=True, slots=True)
class RandomSparsification:
    """Each value z becomes z / p with probability p, else 0: unbiased. For float32 and float64 values.

    How many values there are differs from payload to payload, so `nbytes` is the most there can be: eight standard
    deviations above n p. One payload in 10^14 has more; elements then count as not drawn, from the last one on.

    Parameters
    ----------
    p : float
        In (0, 1].

    Raises
    ------
    ValueError
        `p` is out of range.
    """

    p: float = 0.01

    def __post_init__(self) -> None:
        options.number(self, "p", "above 0 and at most 1", lambda p: 0 < p <= 1)

    alignment: ClassVar[int] = GROUP  # elements that share a counter of random words

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Header and the most values, rounded up to 8 bytes; whatever the weight."""
        mean = n * self.p
        most = min(n, math.ceil(mean + 8 * math.sqrt(mean * (1 - self.p)) + 32))
        return _HEADER + -(-4 * most // 8) * 8

    def used(self, payload: Bytes, n: int) -> int:
        """Bytes of a payload of `n` elements that say something; what follows need not be sent."""
        return _HEADER + min(4 * int(payload[24:_HEADER].view(np.uint64)[0]), payload.size - _HEADER)

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Draw which values are kept. Raises ValueError if a value is not finite."""
        check_size(self, payload, values.size, 1)
        if not all_finite(values):
            raise ValueError("the values contain NaN or infinity")
        payload[:] = 0
        payload[:16].view(np.uint32)[:] = (*draw.stream.key(), draw.step & 0xFFFFFFFF, draw.source)
        header = payload[16:_HEADER].view(np.uint64)
        header[0] = draw.offset // GROUP
        room = payload[_HEADER:].view(np.float32)
        header[1] = compress_masked(values, self._words(payload, values.size), float(self.p), FLOAT32_MAX, room)

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Draw the same bits and put the values there; what damage made NaN or infinite counts as 0."""
        check_size(self, payload, values.size, weight)
        chosen = payload[_HEADER : self.used(payload, values.size)].view(np.float32)
        spread_masked(self._words(payload, values.size), chosen, values)

    def _words(self, payload: Bytes, n: int) -> NDArray[np.uint64]:
        """Random words, a bit of which is 1 with probability p, from where the header says."""
        words = np.empty(8 * -(-n // GROUP), np.uint64)
        if self.p == 1:
            words[:] = ~np.uint64(0)
            return words
        key_0, key_1, step, source = payload[:16].view(np.uint32).tolist()
        first = payload[16:24].view(np.uint64)[0]
        chance = Fraction(self.p)
        table, rest = bernoulli_table(chance.numerator, chance.denominator - chance.numerator)
        schedule = key_schedule(key_0, key_1)
        draw_words(schedule, first, np.uint64(step), np.uint64(source), table, rest, scratch(), words)
        return words
