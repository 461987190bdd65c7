"""Streams, key schedules and alias tables: pinned, and exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mpicomp.kernels.streams import Stream, bernoulli_table, key_schedule, source

EXACTNESS = Fraction(1, 2**33)
WEIGHTS = [(a, total - a) for total in range(2, 34) for a in range(1, total)]


def pattern_probabilities(incoming: int, held: int) -> list[Fraction]:
    """Return the probabilities of the sixteen outcomes of a table's cells, as the kernel reads them."""
    table, rest = bernoulli_table(incoming, held)
    alias = table[:16].tolist()
    low = rest.tolist() or [0] * 16
    chance = [Fraction(0)] * 16
    for cell in range(16):
        own = Fraction(int(table[32 + cell]) << 32 | low[cell], 2**40)
        chance[cell] += own / 16
        chance[alias[cell]] += (1 - own) / 16
    return chance


@pytest.mark.parametrize(
    ("stream", "key"),
    [
        (Stream(0, 0, "merge"), (0xC46C7B60, 0xAD0FBB19)),
        (Stream(1, 0, "merge"), (0x131CB5C1, 0x32E06370)),
        (Stream(0, 1, "merge"), (0x197D1BB1, 0x62EFEA63)),
        (Stream(0, 0, "stochastic sign"), (0x7BB66639, 0xE64AB955)),
        (Stream(-1, 7, "merge"), (0x1396ECDC, 0x98EA315B)),
    ],
)
def test_keys_of_streams_are_pinned(stream: Stream, key: tuple[int, int]) -> None:
    assert stream.key() == key


def test_seeds_count_up_to_64_bits() -> None:
    assert Stream(-1, 0, "merge").key() == Stream(2**64 - 1, 0, "merge").key()
    assert Stream(2**32, 0, "merge").key() != Stream(0, 0, "merge").key()


def test_seed_vector_and_purpose_cannot_be_confused() -> None:
    streams = [Stream(1, 11, "merge"), Stream(11, 1, "merge"), Stream(111, 1, "merge"), Stream(1, 1, "1/merge")]
    assert len({stream.key() for stream in streams}) == len(streams)


def test_schedule_holds_each_round_key_four_times() -> None:
    schedule = key_schedule(0xFFFFFFFF, 1)
    assert schedule.dtype == np.uint64
    rounds = schedule.reshape(7, 2, 4)
    assert (rounds == rounds[:, :, :1]).all()
    assert rounds[:2, :, 0].tolist() == [[0xFFFFFFFF, 1], [0x9E3779B8, 0xBB67AE86]]
    assert rounds[6, :, 0].tolist() == [(0xFFFFFFFF + 6 * 0x9E3779B9) % 2**32, (1 + 6 * 0xBB67AE85) % 2**32]


def test_source_tells_ranks_and_ordinals_apart() -> None:
    assert source(5, 3) == 5 + 3 * 2**20
    assert source(2**20 - 1, 2**12 - 1) == 2**32 - 1


@pytest.mark.parametrize(("rank", "ordinal"), [(2**20, 0), (0, 2**12), (-1, 0), (0, -1)])
def test_source_refuses_what_does_not_fit(rank: int, ordinal: int) -> None:
    with pytest.raises(ValueError, match=f"not rank {rank}, ordinal {ordinal}"):
        source(rank, ordinal)


def test_bits_of_a_pattern_are_set_independently_with_the_exact_probability() -> None:
    for incoming, held in WEIGHTS:
        p, chances = Fraction(incoming, incoming + held), pattern_probabilities(incoming, held)
        assert sum(chances) == 1
        for pattern, chance in enumerate(chances):
            ones = pattern.bit_count()
            assert abs(chance - p**ones * (1 - p) ** (4 - ones)) <= EXACTNESS
        for bit in range(4):
            marginal = sum(chance for pattern, chance in enumerate(chances) if pattern >> bit & 1)
            assert abs(marginal - p) <= EXACTNESS


def test_large_weights_are_as_exact() -> None:
    for incoming, held in ((1, 4095), (4095, 1), (511, 513), (1, 2**20 - 1)):
        chance = pattern_probabilities(incoming, held)
        ones = sum(p for pattern, p in enumerate(chance) if pattern & 1)
        assert abs(ones - Fraction(incoming, incoming + held)) <= EXACTNESS


def test_table_is_laid_out_as_the_kernel_loads_it() -> None:
    for weights in WEIGHTS:
        table, rest = bernoulli_table(*weights)
        assert (table.dtype, table.shape, rest.dtype) == (np.uint8, (64,), np.uint64)
        np.testing.assert_array_equal(table[:16], table[16:32])
        np.testing.assert_array_equal(table[32:48], table[48:])
        assert table[:16].max() < 16
        assert not rest.size or rest.max() < 2**32


def test_equal_weights_need_no_second_draw() -> None:
    for weight in (1, 2, 16):
        table, rest = bernoulli_table(weight, weight)
        assert not rest.size
        assert table[:16].tolist() == list(range(16))


def test_only_the_ratio_of_the_weights_counts() -> None:
    for (a, b), factor in (((1, 2), 3), ((3, 1), 5)):
        for small, large in zip(bernoulli_table(a, b), bernoulli_table(factor * a, factor * b), strict=True):
            np.testing.assert_array_equal(small, large)
