"""Drawn words have their probabilities and no visible structure, within bounds that chance breaks once in 10^9."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.sign import Sign
from mpicomp.kernels.streams import Stream, source
from tests.reference.statistics import assert_binomial, assert_chi_square

BITS = 1 << 20
GROUPS = BITS // 512
WEIGHTS = [(1, 1), (1, 2), (2, 1), (3, 2), (1, 6), (7, 1), (4, 13)]
PLACE = {"seed": 1, "vector_id": 0, "purpose": "merge", "step": 0, "rank": 0, "ordinal": 0, "group": 0}
# everything that distinguishes two draws, one at a time
ELSEWHERE = [
    {"seed": 2},
    {"seed": 1 + 2**40},
    {"vector_id": 1},
    {"purpose": "other"},
    {"step": 1},
    {"step": 2**31},
    {"rank": 1},
    {"rank": 2**19},
    {"ordinal": 1},
    {"ordinal": 2**11},
    {"group": GROUPS},
    {"group": 2**30},
]


def draw(weights: tuple[int, int], **changed: Any) -> NDArray[np.uint64]:
    at = PLACE | changed
    out = np.empty(BITS // 64, np.uint64)
    stream = Stream(at["seed"], at["vector_id"], at["purpose"])
    Sign().bind("cpu", stream).draw(512 * at["group"], at["step"], source(at["rank"], at["ordinal"]), weights, out)
    return out


def bits_of(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)


def ones(words: NDArray[np.uint64]) -> int:
    return int(np.bitwise_count(words).sum())


@pytest.mark.parametrize("weights", WEIGHTS)
class TestProbability:
    def test_of_all_bits(self, weights: tuple[int, int]) -> None:
        assert_binomial(ones(draw(weights)), BITS, weights[0] / sum(weights))

    def test_of_each_bit_position(self, weights: tuple[int, int]) -> None:
        """Of the 512 in a group: a fault in one lane, draw or half byte shows here."""
        counts = bits_of(draw(weights)).reshape(-1, 512).sum(axis=0)
        assert_binomial(counts, GROUPS, weights[0] / sum(weights), "position")

    def test_of_patterns_of_four(self, weights: tuple[int, int]) -> None:
        p = weights[0] / sum(weights)
        halves = bits_of(draw(weights)).reshape(-1, 4) @ np.array([1, 2, 4, 8])
        expected = np.array([p ** i.bit_count() * (1 - p) ** (4 - i.bit_count()) for i in range(16)]) * halves.size
        assert_chi_square(np.bincount(halves, minlength=16), expected, "half bytes")

    def test_of_pairs_of_elements(self, weights: tuple[int, int]) -> None:
        """Both bits of a pair are 1 with probability p^2; each bit is in one pair only: the pairs are independent."""
        bits, p = bits_of(draw(weights)), weights[0] / sum(weights)
        for distance in (1, 2, 3, 4, 8, 32, 64, 256, 512):
            pairs = bits[: bits.size // (2 * distance) * 2 * distance].reshape(-1, 2, distance)
            assert_binomial((pairs[:, 0] & pairs[:, 1]).sum(), pairs.size // 2, p * p, f"pairs at distance {distance}")

    def test_of_the_same_element_elsewhere(self, weights: tuple[int, int]) -> None:
        p, here = weights[0] / sum(weights), draw(weights)
        for changed in ELSEWHERE:
            assert_binomial(ones(here & draw(weights, **changed)), BITS, p * p, f"pairs with {changed}")


class TestGenerator:
    """A small battery on fair bits of several streams."""

    STREAMS = ({}, {"seed": 0}, {"seed": 2**63}, {"step": 2**32 - 1}, {"rank": 2**20 - 1, "ordinal": 2**12 - 1})

    @pytest.mark.parametrize("stream", STREAMS, ids=str)
    def test_ones_and_runs(self, stream: dict[str, Any]) -> None:
        bits = bits_of(draw((1, 1), **stream))
        assert_binomial(bits.sum(), BITS, 0.5, "ones")
        assert_binomial((bits[1:] != bits[:-1]).sum(), BITS - 1, 0.5, "changes")

    @pytest.mark.parametrize("stream", STREAMS, ids=str)
    def test_bytes_and_pairs_of_bytes(self, stream: dict[str, Any]) -> None:
        values = draw((1, 1), **stream).view(np.uint8)
        assert_chi_square(np.bincount(values, minlength=256), np.full(256, values.size / 256), "bytes")
        pairs = values[:-1].astype(np.int64) >> 4 << 4 | values[1:] >> 4
        assert_chi_square(np.bincount(pairs, minlength=256), np.full(256, pairs.size / 256), "high halves in a row")

    def test_no_word_repeats(self) -> None:
        words = draw((1, 1))
        assert np.unique(words).size == words.size

    @pytest.mark.parametrize("changed", ELSEWHERE, ids=str)
    def test_each_position_is_independent_of_the_same_one_elsewhere(self, changed: dict[str, Any]) -> None:
        differing = bits_of(draw((1, 1)) ^ draw((1, 1), **changed)).reshape(-1, 512).sum(axis=0)
        assert_binomial(differing, GROUPS, 0.5, "differences at position")
