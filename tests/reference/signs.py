"""One-bit signs in plain NumPy: packing, the fused passes one step at a time, and sums in the documented order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
LANES = 16

Vector = NDArray[Any]
Words = NDArray[np.uint64]


def pack_bits(positive: NDArray[np.bool_]) -> Words:
    """Element i as bit i mod 64 of word i div 64, zeros behind the end."""
    packed = np.packbits(positive, bitorder="little")
    return np.pad(packed, (0, -packed.size % 8)).view(np.uint64)


def unpack_bits(bits: Words, n: int) -> NDArray[np.bool_]:
    """The first `n` bits."""
    return np.unpackbits(bits.view(np.uint8), count=n, bitorder="little").astype(bool)


def signs(w: Vector, odd_positive: bool | None) -> NDArray[np.bool_]:
    """Whether each element counts as positive; `odd_positive` says which zeros do, None: all of them."""
    if odd_positive is None:
        return w >= 0
    return (w > 0) | ((w == 0) & ((np.arange(w.size) % 2 == 1) == odd_positive))


def block_sums(terms: NDArray[np.float64], stride: int) -> NDArray[np.float64]:
    """Sum of each block of 4096: 16 lanes in index order, folded in halves, then what whole `stride`s leave over."""
    sums = []
    for start in range(0, terms.size, BLOCK):
        block = terms[start : start + BLOCK]
        whole = block.size // stride * stride
        lanes = np.concatenate([np.zeros((1, LANES)), block[:whole].reshape(-1, LANES)]).cumsum(axis=0)[-1]
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        rest = np.float64(0)
        for term in block[whole:]:
            rest += term
        sums.append(lanes[0] + rest)
    return np.array(sums, np.float64)


def magnitudes(u: Vector) -> NDArray[np.float64]:
    """Sums of |u| per block of 4096, in float64."""
    return block_sums(np.abs(u.astype(np.float64)), 64)


def magnitude_from(u: Vector, start: int) -> np.float64:
    """Sum of |u|, elements of one block from `start` on: those of whole words by lanes, and then the others."""
    terms = np.abs(u.astype(np.float64))
    head = min(u.size, -start % 64)
    tail = head + (u.size - head) // 64 * 64
    rest = np.float64(0)
    for term in (*terms[:head], *terms[tail:]):
        rest += term
    return block_sums(terms[head:tail], 64).sum() + rest


class Encoded(NamedTuple):
    """What one encoding pass leaves behind."""

    bits: Words
    residual: Vector | None
    clipped: int
    sums: NDArray[np.float64]


def encode_plain(u: Vector, odd_positive: bool) -> Encoded:
    """No residual: zeros alternate."""
    return Encoded(pack_bits(signs(u, odd_positive)), None, 0, magnitudes(u))


def encode_own(u: Vector, residual: Vector, step: Any, limit: Any) -> Encoded:
    """Residual "own": the rank's own vote is subtracted, and the rest clipped."""
    w = u + residual
    positive = signs(w, None)
    missed = w - np.where(positive, step, -step)
    clipped = (missed > limit) | (missed < -limit)
    return Encoded(pack_bits(positive), np.clip(missed, -limit, limit), int(clipped.sum()), magnitudes(u))


def settle(residual: Vector, bits: Words, previous: Any) -> Vector:
    """Residual "paper": subtract the result of the step before."""
    return residual - np.where(unpack_bits(bits, residual.size), previous, -previous)


def encode_paper(u: Vector, residual: Vector, bits: Words, previous: Any) -> Encoded:
    """Residual "paper", settled first: what stays is w itself, from which the result is still to be subtracted."""
    w = u + settle(residual, bits, previous)
    return Encoded(pack_bits(signs(w, None)), w, 0, magnitudes(u))
