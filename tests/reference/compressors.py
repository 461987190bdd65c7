"""The codecs of the methods with error feedback in plain NumPy: what values become, given the random words."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs import Codec, Draw
from mpicomp.codecs.clipping import Clipping
from mpicomp.codecs.levels import Levels
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.codecs.random_sparsification import RandomSparsification
from mpicomp.codecs.scaled_sign import OneBit, TwoMeans
from mpicomp.codecs.sparse_levels import SparseLevels
from mpicomp.codecs.ternary import Ternary
from mpicomp.codecs.top_k import TopK
from mpicomp.kernels.streams import bernoulli_table
from tests.reference.levels import in_levels
from tests.reference.philox import mix_words
from tests.reference.signs import block_sums, unpack_bits
from tests.reference.sparse import FLOAT32_MAX, largest_in_levels, top
from tests.reference.stochastic_signs import shared, uniforms

Values = NDArray[Any]


def total(terms: Values) -> float:
    """Sum in float64, in the kernels' order: blocks of 4096, one after the other."""
    found = 0.0
    for block in block_sums(terms.astype(np.float64), 16):
        found += float(block)
    return found


def float32(number: float) -> np.float32:
    """Rounded once, the largest number at most."""
    return np.float32(min(max(number, -FLOAT32_MAX), FLOAT32_MAX))


def norm(bucket: Values, kind: str) -> float:
    """Of one bucket."""
    wide = np.abs(bucket.astype(np.float64))
    if kind == "linf":
        return float(wide.max(initial=0))
    return float(np.sqrt(total(wide * wide))) if kind == "l2" else total(wide)


def buckets(values: Values, bucket: int) -> Iterator[tuple[int, Values]]:
    """Number of the first element, and the elements, of each."""
    for start in range(0, values.size, bucket):
        yield start, values[start : start + bucket]


def words(draw: Draw, n: int) -> NDArray[np.uint32]:
    """32 bits for each element from the draw's offset on."""
    skipped = draw.offset % 512
    at = draw.offset // 512, n + skipped, draw.step & 0xFFFFFFFF, int(draw.source)
    return uniforms(draw.stream.key(), *at)[skipped:]


def chosen(draw: Draw, n: int, p: float) -> NDArray[np.bool_]:
    """Whether each element from the draw's offset on, a multiple of 512, is kept: each with probability p."""
    if p == 1:
        return np.ones(n, bool)
    chance = Fraction(p)
    table, rest = bernoulli_table(chance.numerator, chance.denominator - chance.numerator)
    at = draw.offset // 512, -(-n // 512), draw.step & 0xFFFFFFFF, int(draw.source)
    return unpack_bits(mix_words(draw.stream.key(), *at, table, rest), n)


def levels(values: Values, scale: np.float32, s: int, drawn: NDArray[np.uint32]) -> Values:
    """floor(s |x| / scale + u) of each element, float64."""
    ratio = s / float(scale) if scale > 0 else 0.0
    place = np.abs(values.astype(np.float64)) * ratio
    return np.floor(np.minimum(place, s) + drawn.astype(np.float64) * 2.0**-32)


def decoded(codec: Codec, values: Values, draw: Draw, scales: NDArray[np.float32] | None = None) -> Values:
    """What all ranks make of the codes of `values`; `scales` as in TernGrad."""
    out = np.empty_like(values)
    if isinstance(codec, Clipping):
        kept = np.uint32(0xFFFFFFFF) << np.uint32(32 - codec.bits)
        return (values.astype(np.float32).view(np.uint32) & kept).view(np.float32).astype(values.dtype)
    if isinstance(codec, TopK):
        out[:], places = 0, top(values, codec.elements, codec.keep)
        out[places] = values[places].astype(np.float64 if codec.double else np.float32)
        return out
    if isinstance(codec, SparseLevels):
        return largest_in_levels(values, codec.rate, codec.chunk, codec.bits)
    if isinstance(codec, Levels):
        return in_levels(values, codec.levels, codec.bucket, codec.coding)
    if isinstance(codec, RandomSparsification):
        quotients = np.clip(values.astype(np.float64) / codec.p, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
        return np.where(chosen(draw, values.size, codec.p), quotients, 0).astype(values.dtype)
    assert isinstance(codec, Quantizer | OneBit | TwoMeans)
    drawn = words(draw, values.size)
    if getattr(codec, "correlated", False):
        drawn = shared(draw.stream.key(), draw.offset + values.size, draw.step, draw.rank, draw.ranks)[draw.offset :]
    for number, (start, bucket) in enumerate(buckets(values, codec.bucket)):
        part = slice(start, start + bucket.size)
        positive = bucket >= 0
        if isinstance(codec, Quantizer):
            scale = float32(norm(bucket, codec.norm)) if scales is None else scales[number]
            level = levels(bucket, scale, codec.levels, drawn[part])
            if isinstance(codec, Ternary):
                scale = float32(norm(bucket, "l2") / np.sqrt(max(1, np.count_nonzero(level))))
            size = level * (float(scale) / codec.levels)
            out[part] = np.where(bucket < 0, -size, size)
        elif isinstance(codec, OneBit):
            by = np.sqrt(bucket.size) if codec.scale == "l2" else bucket.size
            scale = float32(norm(bucket, codec.scale) / by)
            out[part] = np.where(positive | (scale == 0), scale, -scale)
        else:
            above, below = (
                float32(total(np.where(side, bucket, 0)) / max(1, np.count_nonzero(side)))
                for side in (positive, ~positive)
            )
            out[part] = np.where(positive, above, below)
    return out
