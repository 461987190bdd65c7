"""The largest elements of each tensor's chunks, in four levels per tensor.

    v     = the largest magnitudes of each chunk; chunks count from each tensor's start
    c     = v - mean(v) over the tensor;   q = clip(round(4 c / (6 std(c)) + 2), 0, 3)
    level = mean(v) + the mean of the c with the same q

Wire format: four levels per tensor, or without levels the values, as float32, zeros up to a multiple of 8 bytes. Then
bit planes (`mpicomp.kernels.cpu.planes`): ceil(log2 chunk) of the places within the chunks, two of the levels' numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from collectives.annotations import Array, Bytes, override
from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Draw, FeedbackCodec, Finite, SpreadingCodec, check_size, require_finite
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.top_k import Selector, count_kept, index_bits, pack_indices, unpack_indices
from mpicomp.kernels.cpu.planes import powers_of_two

_POWERS = powers_of_two(2, np.uint8)


def represents(gain: float) -> bool:
    """Return whether a factor is positive and in the range of normal float32 numbers."""
    return float(np.finfo(np.float32).tiny) <= gain <= FLOAT32_MAX


@lru_cache(maxsize=256)
def _layout(n: int, lengths: tuple[int, ...], chunk: int, keep: int, bits: int) -> tuple[Array, int, int, int]:
    """Return the lengths, the kept elements, the byte where planes begin, and words of a plane."""
    padded = [-(-length // 64) * 64 for length in lengths]
    if lengths and n not in (sum(padded), sum(padded[:-1]) + lengths[-1]):
        raise ValueError(f"tensors of {[*lengths]} elements, padded to multiples of 64, do not fill {n} elements")
    found = sum(count_kept(length, chunk, keep) for length in lengths)
    floats = 4 * len(lengths) if bits == 2 else found
    return np.array(lengths, np.int64), found, -(-4 * floats // 8) * 8, -(-found // 64)


@dataclass(frozen=True, slots=True)
class SparseLevels(FeedbackCodec, SpreadingCodec):
    """Sends the largest magnitudes of each chunk in four levels; all other elements decode to 0. For the host.

    Parameters
    ----------
    rate, chunk : int
        The chunk / rate largest elements of each `chunk` are kept.
    bits : 2 or 32
        Bits of a value: four levels per tensor, or float32.
    lengths : tuple of int, optional
        Elements of each tensor, which begins at the next multiple of 64. None: the vector is one tensor.
    gain : float
        Factor of the values that are decoded. `encode_keeping` subtracts them without it.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, SparseLevels
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = SparseLevels(rate=2, chunk=4), np.array([1, -8, 2, 0, 3, 1, 7, 1], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> codec.decode(payload, values, weight=1)
    >>> values
    array([ 0. , -8. ,  2.5,  0. ,  2.5,  0. ,  7. ,  0. ], dtype=float32)
    """

    rate: int = 64
    chunk: int = 4096
    bits: Literal[2, 32] = 2
    lengths: tuple[int, ...] | None = None
    gain: float = 1.0

    fuses = "decayed residual"

    def __post_init__(self) -> None:
        options.integer(self, "rate", 1, options.MOST_ELEMENTS)
        options.integer(self, "chunk", 1, options.MOST_ELEMENTS)
        options.require(self.chunk % self.rate == 0, "chunk", f"a multiple of rate, {self.rate}", self.chunk)
        options.integer(self, "bits")
        options.require(self.bits in (2, 32), "bits", "2 or 32", self.bits)
        options.number(self, "gain", "a positive number that float32 represents", represents)
        whole = self.lengths is None or all(options.whole(length, 1) for length in self.lengths)
        options.require(whole, "lengths", "numbers of elements, 1 or more", self.lengths)

    @property
    @override
    def alignment(self) -> int:
        if self.lengths is None:
            return math.lcm(self.chunk, 64)
        # the whole vector: mean and levels of a tensor need all of it
        return 64 * max(1, sum(-(-length // 64) for length in self.lengths))

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        *_, start, words = self._layout(n)
        return start + 8 * words * (index_bits(self.chunk) + self.bits % 32)

    def _layout(self, n: int) -> tuple[Array, int, int, int]:
        lengths = self.lengths if self.lengths is not None else (n,) if n else ()
        return _layout(n, lengths, self.chunk, self.chunk // self.rate, self.bits)

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        return self._encode(values, (None, None, None), payload)

    @override
    def encode_keeping(self, values: Array, residual: Array, payload: Bytes, left: Array, decay: float = 1.0) -> Finite:
        finite = self._encode(values, (residual, left.dtype.type(decay), left), payload)
        if not self._put(payload, left, -1, True):
            raise OverflowError("the error of the levels is beyond the range of the residual's type")
        return finite

    def _encode(self, values: Array, past: tuple[Any, Any, Any], payload: Bytes) -> Finite:
        check_size(self, payload, len(values), 1)
        lengths, found, *_ = self._layout(len(values))
        floats, places, numbers = self._parts(payload, len(values))
        keep, on = self.chunk // self.rate, kernels.of("cpu")
        indices, chosen = np.empty(found, np.uint32), np.empty(found, values.dtype)
        select = Selector(self.chunk, keep, values.dtype, len(values))
        finite = require_finite(select.of_tensors(values, past, lengths, indices, chosen))
        pack_indices(indices, places)
        if self.bits == 32:
            floats[found:] = 0
            floats[:found] = np.clip(chosen, -FLOAT32_MAX, FLOAT32_MAX)
        else:
            codes, work = np.empty(found, np.uint8), (np.empty(4), np.empty(4, np.int64))
            on.sparse_levels.quantize(chosen, lengths, self.chunk, keep, *work, codes, floats)
            on.planes.pack_planes(codes, _POWERS, numbers)
        return finite

    @override
    def _spread(self, payload: Bytes, out: Array, weight: int, adding: bool) -> None:
        check_size(self, payload, len(out), weight)
        self._put(payload, out, self.gain, adding)

    def _put(self, payload: Bytes, out: Array, factor: float, adding: bool) -> bool:
        """Write the payload's values times a factor to `out`, or with `adding` add them; return if all are finite."""
        lengths, found, *_ = self._layout(len(out))
        floats, places, numbers = self._parts(payload, len(out))
        shape, on = (lengths, self.chunk, self.chunk // self.rate), kernels.of("cpu")
        indices, values = np.empty(found, np.uint32), floats
        unpack_indices(places, indices)
        if self.bits == 2:
            codes, levels, values = np.empty(found, np.uint8), values, np.empty(found, np.float32)
            on.planes.unpack_planes(numbers, _POWERS, codes)
            on.sparse_levels.look_up(codes, *shape, levels, values)
        return bool(on.sparse_levels.spread(values, indices, *shape, out.dtype.type(factor), out, adding))

    def _parts(self, payload: Bytes, n: int) -> tuple[Array, Array, Array]:
        """Return views of the levels or values, of the planes of places, and of those of the levels' numbers."""
        (*_, start, words), bits = self._layout(n), index_bits(self.chunk)
        planes = payload[start:].view(np.uint64).reshape(bits + self.bits % 32, words)
        return payload[:start].view(np.float32), planes[:bits], planes[bits:]
