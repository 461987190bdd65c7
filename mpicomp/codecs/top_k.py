"""The largest elements of each chunk of a vector.

Wire format: the kept values, chunk after chunk, in ascending order of place, as float32 (or float64), zeros up
to a multiple of 8 bytes; then their places within the chunks as bit planes of ceil(log2 chunk) bits
(`mpicomp.kernels.cpu.planes`). The size follows from the number of elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray, Array, Bytes, override
from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Draw, FeedbackCodec, Finite, SpreadingCodec, check_size, require_finite
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.kernels.cpu.planes import powers_of_two

_DEEPEST = 16  # elements of the groups whose maxima are taken
_MASKS: dict[int, np.unsignedinteger] = {4: np.uint32(0x7FFFFFFF), 8: np.uint64(0x7FFFFFFFFFFFFFFF)}
_FLOATS = {4: np.float32, 8: np.float64}
_INFINITY = {4: 0x7F800000, 8: 0x7FF0000000000000}
_POWERS = powers_of_two(32, np.uint32)
# Elements of a chunk up to which a device encodes by one kernel, and up to which it decodes and averages by one kernel
# if at most so many of each are kept: other shapes are faster in several passes.
_ENCODED_AT_ONCE, _AVERAGED_AT_ONCE, _KEPT_AT_ONCE = 128, 2048, 4


def count_kept(n: int, chunk: int, keep: int) -> int:
    """Return the kept elements of `n`: `keep` of each chunk, ceil(keep m / chunk) of a short one of m elements."""
    return n // chunk * keep + -(-(n % chunk * keep) // chunk)


def index_bits(chunk: int) -> int:
    """Return the bits of a place within a chunk."""
    return (chunk - 1).bit_length()


@lru_cache(maxsize=4096)
def _layout(n: int, chunk: int, rate: int, double: bool) -> tuple[int, int, int, int]:
    """Return the byte where values end, the byte where planes begin, the number of planes, and words of a plane."""
    found = count_kept(n, chunk, chunk // rate)
    end = (8 if double else 4) * found
    return end, -(-end // 8) * 8, index_bits(chunk), -(-found // 64)


class Selector:
    """Picks the `keep` largest magnitudes of each chunk of 1 to 2^32 elements."""

    def __init__(self, chunk: int, keep: int, dtype: DTypeLike, longest: int | None = None) -> None:
        self.chunk, self.keep = chunk, keep
        # the longest vector sizes working memory for vectors shorter than a chunk
        self._elements = chunk if longest is None else min(chunk, longest)
        itemsize = np.dtype(dtype).itemsize
        self._mask, self._infinity = _MASKS[itemsize], _INFINITY[itemsize]
        # with at least twice as many groups as kept elements, few other elements reach the bound
        self._depth = max(1, min(_DEEPEST, chunk // (2 * keep)))
        self._work: tuple[AnyArray, ...] = ()  # allocated by the first call

    def _working_memory(self) -> tuple[AnyArray, ...]:
        """Return the arrays for maxima, places and sizes of the CPU's kernel."""
        if not self._work:
            sizes, reaching = self._mask.dtype, min(self._elements, self.keep * (self._depth + 1))
            maxima = np.empty(self._elements // self._depth + 64, sizes)
            self._work = maxima, np.empty(reaching, np.uint32), np.empty(reaching + 16, sizes)
        return self._work

    def __call__(
        self, x: Array, residual: Array | None, indices: Array, values: Array, left: Array | None = None
    ) -> Finite:
        """Select elements of x + residual, float32[n] or float64[n]; return whether all of them are finite."""
        # overwritten: uint32 places within chunks, ascending; the elements there; and `left` with x + residual, which
        # shares no memory with these
        if not len(x):
            return True
        on = kernels.beside(x).top_k
        if self.keep == 1:
            most = on.largest(x, residual, left, self.chunk, self._mask, indices, values)
        else:
            work = self._working_memory() if isinstance(x, np.ndarray) else (None, None, None)
            most = on.several(x, residual, left, *self._shape, *work, indices, values)
        return most < self._infinity

    def of_tensors(self, x: Array, past: tuple[Any, Any, Any], lengths: Array, indices: Array, values: Array) -> Finite:
        """Select elements of each tensor's chunks, on the host; a tensor begins at the next multiple of 64."""
        # past is (residual, decay, left), or all None: `left` is overwritten with x + decay residual, of which elements
        # are selected, and with 0 between tensors
        select, work = kernels.of("cpu").sparse_levels.select, self._working_memory()
        return bool(select(x, *past, lengths, *self._shape, *work, indices, values) < self._infinity)

    @property
    def _shape(self) -> tuple[Any, ...]:
        high = np.uint64(1 << (8 * self._mask.nbytes - 2))
        return self.chunk, self.keep, self._depth, self._mask, high


def pack_indices(indices: Array, planes: Array) -> None:
    """Pack places within chunks into bit planes, uint64[bits, ceil(k / 64)]."""
    kernels.beside(indices).planes.pack_planes(indices, _POWERS, planes)


def unpack_indices(planes: Array, indices: Array) -> None:
    """Unpack places from bit planes. Damaged planes yield places that may lie outside their chunks."""
    kernels.beside(indices).planes.unpack_planes(planes, _POWERS, indices)


@dataclass(frozen=True, slots=True)
class TopK(FeedbackCodec, SpreadingCodec):
    """Sends the largest magnitudes of each chunk; all other elements decode to 0. For float32 and float64 values.

    Parameters
    ----------
    rate : int
        Elements per kept element.
    chunk : int, optional
        Elements of a chunk, a multiple of `rate`; the chunk / rate largest are kept. None: `rate`, of which one is
        kept. Longer chunks cost more, and find larger magnitudes where these lie close together.
    double : bool
        Send float64; otherwise values are rounded to float32.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, TopK
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = TopK(rate=4), np.array([1, -8, 2, 0, 3, 1, 7, 1], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> codec.decode(payload, values, weight=1)
    >>> values
    array([ 0., -8.,  0.,  0.,  0.,  0.,  7.,  0.], dtype=float32)
    """

    rate: int = 100
    chunk: int | None = None
    double: bool = False

    encodes_on_devices: ClassVar[bool] = True
    fuses = "residual"

    def __post_init__(self) -> None:
        options.integer(self, "rate", 1, options.MOST_ELEMENTS)
        options.chunk(self, (self.rate,))
        options.flag(self, "double")

    @property
    def elements(self) -> int:
        """Elements of a chunk."""
        return self.chunk or self.rate

    @property
    def keep(self) -> int:
        """Kept elements of a chunk."""
        return self.elements // self.rate

    @property
    @override
    def alignment(self) -> int:
        return math.lcm(self.elements, 64)

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        _, start, bits, words = self._layout(n)
        return start + 8 * bits * words

    def _layout(self, n: int) -> tuple[int, int, int, int]:
        return _layout(n, self.elements, self.rate, self.double)

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        if self._encodes_at_once(values):
            return self._encode_at_once(values, None, payload, None)
        return self._encode(values, None, payload, None)[1]

    @override
    def encode_keeping(self, values: Array, residual: Array, payload: Bytes, left: Array, decay: float = 1.0) -> Finite:
        if self._encodes_at_once(values):
            return self._encode_at_once(values, residual, payload, left)
        indices, finite = self._encode(values, residual, payload, left)
        on, sent = kernels.beside(values), self._parts(payload, len(values), 1)[0]
        taken = on.arrays.convert(-sent, left.dtype)
        on.sparse.spread_chunks(taken, indices, self.elements, self.keep, left, True)
        return finite

    def _encodes_at_once(self, values: Array) -> bool:
        """Return whether a device selects, packs and subtracts in one launch."""
        return not isinstance(values, np.ndarray) and self.keep == 1 and self.elements <= _ENCODED_AT_ONCE

    def _encode_at_once(self, values: Array, residual: Array | None, payload: Bytes, left: Array | None) -> Finite:
        """Encode p = values + residual on a device; `left`, if given, is overwritten with p less the values sent."""
        parts = self._parts(payload, len(values), 1)
        return kernels.beside(values).top_k.encode(values, residual, left, self.elements, *parts)

    def _encode(
        self, values: Array, residual: Array | None, payload: Bytes, left: Array | None
    ) -> tuple[Array, Finite]:
        """Encode p = values + residual; return the places within chunks, and whether all of p is finite.

        `left`, if given, is overwritten with p.
        """
        arrays, (chosen, planes) = kernels.beside(values).arrays, self._parts(payload, len(values), 1)
        indices = arrays.empty(values, len(chosen), "uint32")
        found = arrays.empty(values, len(chosen), values.dtype)
        select = Selector(self.elements, self.keep, _FLOATS[values.itemsize])
        finite = require_finite(select(values, residual, indices, found, left))
        if values.itemsize > chosen.itemsize:
            found = arrays.xp.clip(found, -FLOAT32_MAX, FLOAT32_MAX)
        payload[chosen.nbytes : self._layout(len(values))[1]] = 0
        chosen[:] = found
        pack_indices(indices, planes)
        return indices, finite

    @override
    def _spread(self, payload: Bytes, out: Array, weight: int, adding: bool) -> None:
        on = kernels.beside(out)
        chosen, planes = self._parts(payload, len(out), weight)
        indices = on.arrays.empty(out, len(chosen), "uint32")
        unpack_indices(planes, indices)
        if out.itemsize < chosen.itemsize:
            chosen = on.arrays.xp.nan_to_num(chosen, nan=0, posinf=0, neginf=0)
            chosen = on.arrays.convert(on.arrays.xp.clip(chosen, -FLOAT32_MAX, FLOAT32_MAX), out.dtype)
        on.sparse.spread_chunks(chosen, indices, self.elements, self.keep, out, adding)

    def clear_sent(self, payload: Bytes, out: Array) -> None:
        """Overwrite the elements of a vector that a payload has with 0."""
        on, (chosen, planes) = kernels.beside(out), self._parts(payload, len(out), 1)
        indices, places = (on.arrays.empty(out, len(chosen), kind) for kind in ("uint32", "int64"))
        unpack_indices(planes, indices)
        on.sparse.expand(indices, self.elements, self.keep, 0, len(out), places)
        on.sparse.remember(None, out, None, None, 0, places, None, out)

    @override
    def mean(self, payloads: Array, mean: Array) -> Finite:
        on, n = kernels.beside(mean), len(mean)
        if self.keep > _KEPT_AT_ONCE or self.elements > _AVERAGED_AT_ONCE or self.double != (mean.itemsize == 8):
            return SpreadingCodec.mean(self, payloads, mean)
        check_size(self, payloads[0], n, 1)
        end, start, bits, words = self._layout(n)
        chosen = on.arrays.view(payloads[:, :end], "float64" if self.double else "float32")
        planes = on.arrays.view(payloads[:, start:], "uint64").reshape(len(payloads), bits, words)
        return on.top_k.mean(chosen, planes, self.elements, self.keep, mean)

    def _parts(self, payload: Bytes, n: int, weight: int) -> tuple[Array, Array]:
        """Return views of the values and of the planes."""
        check_size(self, payload, n, weight)
        view, (end, start, bits, words) = kernels.beside(payload).arrays.view, self._layout(n)
        chosen = view(payload[:end], "float64" if self.double else "float32")
        return chosen, view(payload[start:], "uint64").reshape(bits, words)
