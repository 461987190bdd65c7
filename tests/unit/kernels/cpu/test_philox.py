"""Random words of the kernels: the published generator, the documented layout, the reference's bits."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from mpicomp.kernels.cpu.philox import draw, draw_words, load_keys, merge_words
from mpicomp.kernels.cpu.simd import store
from mpicomp.kernels.streams import Stream, bernoulli_table, key_schedule
from tests.reference import philox as reference

# Random123's kat_vectors for philox4x32 with 7 rounds: counter, key, output
KNOWN_ANSWERS = (
    ((0,) * 4, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
)
KEY = Stream(3, 1, "merge").key()
WEIGHTS = ((1, 1), (1, 2), (2, 1), (3, 2), (1, 6), (7, 1), (31, 2))


@njit(nogil=True)
def one_group(schedule, group, number, step, source, out):
    low, high = draw(load_keys(schedule), group, number, step, source)
    store(out, 0, low)
    store(out, 4, high)


def words(
    weights: tuple[int, int], n_groups: int, first_group: int = 0, step: int = 5, source: int = 9, tile: int = 64
) -> NDArray[np.uint64]:
    scratch, out = np.empty(24 * tile, np.uint64), np.empty(8 * n_groups, np.uint64)
    table, rest = bernoulli_table(*weights)
    numbers = (np.uint64(number) for number in (first_group, step, source))
    draw_words(key_schedule(*KEY), *numbers, table, rest, scratch, out)
    return out


def expected(weights: tuple[int, int], n_groups: int, first_group: int = 0, step: int = 5, source: int = 9) -> Any:
    return reference.mix_words(KEY, first_group, n_groups, step, source, *bernoulli_table(*weights))


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_the_published_answers_are_given_in_the_documented_place(
    counter: tuple[int, int, int, int], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    assert reference.philox(counter, key) == output
    arrays = [np.full(3, number, np.uint64) for number in counter]
    assert [x.tolist() for x in reference.philox(tuple(arrays), key)] == [[x] * 3 for x in output]
    block = counter[0] | counter[1] >> 8 << 32
    number, step, source = counter[1] & 0xFF, counter[2], counter[3]
    out = np.zeros(8, np.uint64)
    one_group(key_schedule(*key), *(np.uint64(i) for i in (block // 4, number, step, source)), out)
    assert out[block % 4] == output[0] | output[1] << 32
    assert out[4 + block % 4] == output[2] | output[3] << 32


# 2^30 groups begin where the block number passes 32 bits; 2^25 where that of the half bytes does
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("n_groups", "first_group"),
    [(n, 0) for n in (0, 1, 2, 63, 64, 65, 200)] + [(60, n) for n in (1, 2**25 - 30, 2**30 - 30, 2**31, 2**40 + 7)],
)
def test_words_equal_the_reference(weights: tuple[int, int], n_groups: int, first_group: int) -> None:
    np.testing.assert_array_equal(words(weights, n_groups, first_group), expected(weights, n_groups, first_group))


@given(
    weights=st.sampled_from(WEIGHTS),
    step=st.integers(0, 2**32 - 1),
    source=st.integers(0, 2**32 - 1),
    first_group=st.integers(0, 2**50),
)
def test_words_of_any_place_equal_the_reference(
    weights: tuple[int, int], step: int, source: int, first_group: int
) -> None:
    got = words(weights, 3, first_group, step, source)
    np.testing.assert_array_equal(got, expected(weights, 3, first_group, step, source))


@pytest.mark.parametrize("weights", [(1, 1), (3, 2)])
def test_words_depend_on_neither_the_scratch_nor_where_drawing_starts(weights: tuple[int, int]) -> None:
    whole = words(weights, 130)
    for tile in (1, 7, 64, 200):
        np.testing.assert_array_equal(words(weights, 130, tile=tile), whole)
    for start in (1, 64, 129):
        np.testing.assert_array_equal(words(weights, 130 - start, start), whole[8 * start :])


@pytest.mark.parametrize(
    ("weights", "digest"),
    [
        ((1, 1), "9fee4491fe050cc0"),
        ((1, 2), "591110ad3852ac7a"),
        ((3, 2), "389ce07299616b79"),
        ((1, 6), "3f21dee0bbc9cf02"),
        ((31, 2), "03c6acec0994d769"),
    ],
)
def test_words_are_pinned(weights: tuple[int, int], digest: str) -> None:
    """Ranks that run other versions must draw the same words, and results must repeat."""
    assert hashlib.sha256(words(weights, 500).tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("n_words", [0, 1, 7, 8, 1000])
def test_merge_takes_the_incoming_bit_where_the_word_says_so(n_words: int) -> None:
    rng = np.random.default_rng(n_words)
    drawn, incoming, held = rng.integers(0, 2**64, (3, n_words), np.uint64)
    merged = held.copy()
    merge_words(drawn, incoming, merged)
    np.testing.assert_array_equal(merged, reference.merge(drawn, incoming, held))
