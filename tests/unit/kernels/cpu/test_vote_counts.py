"""Counts in bit planes: sums, majorities and values equal the reference at every length; nothing else is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.vote_counts import planes_of, write_values
from mpicomp.kernels.cpu.vote_counts import add_counts, majority, segment_totals
from tests.contracts import guarded
from tests.reference import vote_counts as reference
from tests.reference.signs import pack_bits, unpack_bits

LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1000, 4096 + 320)
WEIGHTS = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (7, 1), (1, 7), (4, 4), (5, 3), (8, 7), (12, 300), (300, 12))


def votes(n: int, weight: int, seed: int = 0) -> NDArray[np.int64]:
    """Counts of so many ranks, all there can be among them."""
    return np.random.default_rng((n, weight, seed)).integers(0, weight + 1, n)


def one_stretch(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int, int]:
    """A vector of one stretch, all of it."""
    return np.array([0]), np.array([n]), 0, 0, 1


def added(incoming: NDArray[np.int64], held: NDArray[np.int64], a: int, b: int) -> NDArray[np.uint64]:
    """The planes of both ranks' counts, of weights a and b, added up in guarded memory from an odd place on."""
    bits, words = planes_of(a + b), -(-held.size // 64)
    given, before = (reference.planes(incoming, planes_of(a)) for _ in range(2))
    with guarded(bits * words, np.uint64, 1) as memory:
        memory[: planes_of(b) * words] = reference.planes(held, planes_of(b))
        add_counts(given, planes_of(a), memory, planes_of(b), bits, words)
    np.testing.assert_array_equal(given, before)
    return memory


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sums_are_exact(weights: tuple[int, int]) -> None:
    for n in LENGTHS:
        incoming, held = votes(n, weights[0]), votes(n, weights[1], 1)
        expected = reference.planes(held + incoming, planes_of(sum(weights)))
        np.testing.assert_array_equal(added(incoming, held, *weights), expected)


def test_counts_above_their_weight_lose_what_goes_beyond_and_write_nothing_else() -> None:
    n = 300
    for a, b in ((2, 2), (4, 1), (1, 4), (5, 6)):
        bits = planes_of(a + b)
        incoming, held = np.full(n, (1 << planes_of(a)) - 1), np.full(n, (1 << planes_of(b)) - 1)
        found = reference.from_planes(added(incoming, held, a, b), n, bits)
        np.testing.assert_array_equal(found, (incoming + held) % (1 << bits))


@pytest.mark.parametrize("weight", [2, 3, 4, 5, 7, 8, 12, 255, 256])
def test_majorities_are_above_half_and_coins_decide_ties(weight: int) -> None:
    for n in LENGTHS:
        counts, words = votes(n, weight), -(-n // 64)
        coins = np.random.default_rng(n).integers(0, 2**64, words, np.uint64)
        planes = reference.planes(counts, planes_of(weight))
        tie = unpack_bits(coins, n) if weight % 2 == 0 else np.zeros(n, bool)
        want = pack_bits((2 * counts > weight) | ((2 * counts == weight) & tie))
        bits = np.full(words, 77, np.uint64)
        given = coins if weight % 2 == 0 else None
        majority(planes, planes_of(weight), words, weight // 2, given, bits)
        np.testing.assert_array_equal(bits, want)
        majority(planes, planes_of(weight), words, weight // 2, given, planes)
        np.testing.assert_array_equal(planes[:words], want, "in the place of the first plane")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_twice_the_count_less_the_weight_times_the_factor(dtype: Any) -> None:
    for n in LENGTHS:
        for weight in (1, 2, 3, 7, 8, 63, 64, 300):
            counts = votes(n, weight)
            planes = reference.planes(counts, planes_of(weight))
            factor = dtype(0.1)
            want = (2 * counts - weight).astype(dtype) * factor
            for streaming, offset in ((False, 0), (False, 1), (True, 0)):
                with guarded(n, dtype, offset) as out:
                    write_values(planes, -(-n // 64), weight, np.array([factor]), one_stretch(n), streaming, out)
                np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("weight", [5, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bucket", [1, 7, 64, 100, 256, 700])
def test_stretches_have_factors_of_their_own_and_zeros_between_them(bucket: int, dtype: Any, weight: int) -> None:
    n, first = 700, 4096
    counts = votes(n, weight)
    planes = reference.planes(counts, planes_of(weight))
    starts = np.arange(first - 30, first + n + 200, bucket)
    for short in (0, min(10, bucket - 1)):
        stops = starts + bucket - short
        factors = np.arange(1, starts.size + 1).astype(dtype)
        want = np.zeros(n, dtype)
        for start, stop, factor in zip(starts - first, stops - first, factors, strict=True):
            part = slice(max(start, 0), max(stop, 0))
            want[part] = (2 * counts - weight)[part] * factor
        low, high = int(np.searchsorted(stops, first, "right")), int(np.searchsorted(starts, first + n))
        for streaming in (False, True):
            with guarded(n, dtype) as out:
                write_values(planes, 11, weight, factors, (starts, stops, first, low, high), streaming, out)
            np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_of_damaged_counts_are_what_the_bits_say(dtype: Any) -> None:
    for weight in (2, 5, 8, 32, 63, 64, 300):
        most = (1 << planes_of(weight)) - 1
        out = np.empty(130, dtype)
        planes = reference.planes(np.full(130, most), planes_of(weight))
        write_values(planes, 3, weight, np.array([0.5], dtype), one_stretch(130), False, out)
        np.testing.assert_array_equal(out, np.full(130, (2 * most - weight) / 2))


def test_segments_blocks_are_added_in_order() -> None:
    sums = np.random.default_rng(0).standard_normal(10)
    totals = np.full(3, 9.0)
    segment_totals(sums, np.array([0, 4, 5]), totals)
    np.testing.assert_array_equal(totals, [((sums[0] + sums[1]) + sums[2]) + sums[3], sums[4], sums[5:].cumsum()[-1]])
