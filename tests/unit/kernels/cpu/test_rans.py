"""Frequencies that add up, and divisions that are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpicomp.kernels.cpu import rans
from tests.contracts import guarded


def normalised(counts: list[int], bits: int) -> NDArray[np.int64]:
    frequencies = np.full(len(counts), -1, np.int64)
    rans.normalise(np.array(counts, np.int64), bits, frequencies)
    return frequencies


def cost(counts: NDArray[np.int64], frequencies: NDArray[np.int64]) -> float:
    """Bits of a message."""
    there = counts > 0
    return float((counts[there] * np.log2(frequencies.sum() / frequencies[there])).sum())


@given(counts=st.lists(st.integers(0, 10) | st.integers(0, 10**9), min_size=1, max_size=256), extra=st.integers(0, 6))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_frequencies_add_up_and_leave_nothing_out(counts: list[int], extra: int) -> None:
    there = np.array(counts) > 0
    if not there.any():
        return
    bits = min(rans.MOST_BITS, max(1, int(there.sum()).bit_length() + extra))
    frequencies = normalised(counts, bits)
    assert frequencies.sum() == 1 << bits
    assert ((frequencies > 0) == there).all()


@pytest.mark.parametrize("p", [0.5, 0.05, 0.005])
def test_frequencies_cost_little_more_than_the_entropy(p: float) -> None:
    counts = np.random.default_rng(2).geometric(p, 250).clip(0, 250) ** 3
    entropy = cost(counts, counts)
    assert cost(counts, normalised(counts.tolist(), 14)) < 1.002 * entropy


@given(
    runs=st.lists(st.tuples(st.integers(0, 100) | st.integers(0, 3000), st.integers(1, 60)), max_size=12),
    zeros=st.integers(0, 60),
    bits=st.integers(8, 14),
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_frequencies_are_read_as_they_were_written(runs: list[tuple[int, int]], zeros: int, bits: int) -> None:
    counts = [count for value, times in runs for count in [value] * times][:195]
    frequencies = normalised([*counts, 1, *[0] * zeros], bits)
    out = np.zeros(1100, np.uint8)
    taken = rans.write_frequencies(frequencies, out[:1024])
    found = np.full_like(frequencies, -1)
    out[20 + taken :] = 0xFF
    payload = np.concatenate([np.zeros(7, np.uint8), out])
    assert rans.read_frequencies(payload, 7, bits, found) == 7 + taken
    np.testing.assert_array_equal(found, frequencies)
    assert rans.read_frequencies(payload[: 7 + taken - 1], 7, bits, found) == -1


def test_frequencies_take_little_where_few_are_not_0() -> None:
    frequencies = np.zeros(243, np.int64)
    frequencies[[0, 81, 162]] = 8000, 96, 96
    out = np.zeros(64, np.uint8)
    # 25 bits, twice 1 + 13 for 80 zeros in a row, twice 13
    assert rans.write_frequencies(frequencies, out) == -(-(25 + 2 * (1 + 13) + 2 * 13) // 8)


def gammas(*numbers: int) -> NDArray[np.uint8]:
    """Their Elias gamma codes."""
    bits = "".join("0" * (n.bit_length() - 1) + "1" + f"{n:b}"[:0:-1] for n in numbers)
    return np.frombuffer(int(bits[::-1], 2).to_bytes(len(bits) // 8 + 1, "little"), np.uint8).copy()


@pytest.mark.parametrize(
    ("numbers", "sound"),
    [
        ((1 + 256,), True),
        ((1, 4, 1 + 256), True),
        ((1 + 255, 2), True),
        ((1 + 255, 1, 3, 2), True),
        ((1 + 257,), False),
        ((1 + 200, 1 + 57), False),
        ((1 + 255, 1, 4, 2), False),
        ((1, 5, 1 + 256), False),
        ((1, 200, 1 + 256), False),
        ((1, 5), False),
        ((2, 2, 2, 2, 2, 1 + 251), False),
        ((1 << 62, 1 << 62, 1 << 62, 1 << 62, 1 + 256), False),
        ((1, 1 << 62, 1, 1 << 62, 1 + 256), False),
        ((1, (1 << 64) - 2, 2, 1 + 255), False),
        ((), False),
    ],
)
def test_frequencies_that_do_not_add_up_or_are_too_many_are_damaged(numbers: tuple[int, ...], sound: bool) -> None:
    """Sums may run over: four of 2^62 add up to nothing in 64 bits."""
    with guarded(5, np.int64) as frequencies:
        found = rans.read_frequencies(gammas(*numbers) if numbers else np.zeros(0, np.uint8), 0, 8, frequencies)
    assert (found > 0) == sound
    assert not sound or frequencies.sum() == 256


@pytest.mark.parametrize("bits", [1, 8, 14])
def test_the_encoder_divides_exactly(bits: int) -> None:
    """State x becomes (x div f) 2^bits + start + x mod f, for every x below the limit of frequency f."""
    rng = np.random.default_rng(bits)
    most = 1 << bits
    for f in {1, 2, min(3, most), most // 2, most - 1, most, *rng.integers(1, most + 1, 300).tolist()}:
        before = most - f
        frequencies = np.array([before, f] if before else [f], np.int64)
        table = np.zeros((frequencies.size, rans.ENCODER_COLUMNS), np.uint32)
        rans.make_encoder(frequencies, bits, table)
        limit, reciprocal, shift, once, each = table[-1, :5].tolist()
        assert limit == f << (31 - bits)
        near = [k * f + d for k in (*range(1, 20), *rng.integers(1, limit // f + 1, 200).tolist()) for d in (-1, 0, 1)]
        for x in (1, limit - 1, *near):
            if 0 < x < limit:
                assert x + once + (x * reciprocal >> shift) * each == x // f * most + before + x % f, (f, x)
