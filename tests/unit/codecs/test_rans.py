"""Entropy coding: decoded symbols, lengths, and damage that does no harm."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpicomp.codecs import Quantizer
from mpicomp.codecs import rans as entropy
from tests.contracts import GUARD, draw_at, gaussian, guarded
from tests.reference import rans as reference

LEVELS = (2, 3, 4, 5, 6, 7, 9, 16, 17, 31, 127, 255)
AROUND = (0, 1, 2, 3, 4, 5, 7, 8, 19, 20, 21, 39, 40, 41, 1000, 8191, 8192, 8193, 8199)


def skewed(n: int, levels: int, zero: float, seed: int = 0) -> NDArray[np.uint8]:
    """Symbols of which the middle one has probability `zero` and the others get half of what is left, each in turn."""
    rng = np.random.default_rng((seed, n, levels))
    distance = np.where(rng.random(n) < zero, 0, rng.geometric(0.5, n))
    signed = distance * rng.choice([-1, 1], n)
    return np.clip(levels // 2 + signed, 0, levels - 1).astype(np.uint8)


def entropy_of(symbols: NDArray[np.uint8]) -> float:
    """Bits per symbol, zeroth order."""
    p = np.bincount(symbols) / symbols.size
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def coded(symbols: NDArray[np.uint8], levels: int) -> NDArray[np.uint8]:
    """Return the message; checks that only the payload is written."""
    most = entropy.most_bytes(symbols.size, levels)
    with guarded(most, np.uint8) as payload:
        used = entropy.encode(symbols, levels, payload)
    assert 0 < used <= most
    return payload[:used].copy()


def decoded(payload: NDArray[np.uint8], levels: int, n: int) -> NDArray[np.uint8]:
    """The symbols; checks that nothing beside them is written, even if the payload is damaged."""
    with guarded(n, np.uint8) as symbols:
        try:
            entropy.decode(payload, levels, symbols)
        finally:
            assert (symbols < levels).all()
    return symbols


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("zero", [0.0, 0.2, 0.5, 0.9, 0.99, 1.0])
def test_symbols_come_back_at_every_length_and_payloads_are_as_described(levels: int, zero: float) -> None:
    for n in (*AROUND, 12_001):
        symbols = skewed(n, levels, zero)
        before = symbols.copy()
        payload = coded(symbols, levels)
        np.testing.assert_array_equal(symbols, before)
        np.testing.assert_array_equal(decoded(payload, levels, n), symbols)
        if zero in (0.2, 0.9):  # the reference is slow
            assert reference.decode(payload.tobytes(), levels, n) == symbols.tolist()


@given(data=st.data(), levels=st.integers(2, 255))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_any_symbols_come_back(data: st.DataObject, levels: int) -> None:
    runs = data.draw(
        st.lists(st.tuples(st.integers(0, levels - 1), st.integers(1, 400) | st.integers(1, 9000)), max_size=12)
    )
    symbols = np.repeat(*np.array(runs or [(0, 0)]).T).astype(np.uint8)
    payload = coded(symbols, levels)
    np.testing.assert_array_equal(decoded(payload, levels, symbols.size), symbols)


@pytest.mark.parametrize("levels", [3, 5, 9, 17, 255])
@pytest.mark.parametrize("target", [0.1, 0.3, 0.5, 1.0, 1.5])
def test_a_long_message_is_within_two_per_cent_of_its_entropy(levels: int, target: float) -> None:
    zeros = 1 - np.geomspace(1e-3, 0.7, 80)
    zero = min(zeros, key=lambda z: abs(entropy_of(skewed(20_000, levels, z)) - target))
    symbols = skewed(1_000_000, levels, zero)
    bits = entropy_of(symbols)
    assert abs(bits - target) < 0.1 * target or levels == 3
    assert 8 * coded(symbols, levels).size <= 1.02 * bits * symbols.size


@pytest.mark.parametrize("n", [120_000, 160_000, 200_000, 240_000])
def test_signs_of_which_few_are_there_are_within_two_per_cent_in_messages_of_a_vectors_pieces(n: int) -> None:
    """Gradients of 1.2 to 4.5 million elements in buckets of 5000 go in 6 to 19 messages of 200,000 codes and more."""
    codec = Quantizer(5000, 1, "l2", "entropy")
    for step in range(3):
        values, draw = gaussian(n, seed=step), draw_at(step)
        symbols = codec.codes(values, codec.scales(values), draw)
        payload = coded(symbols, 3)
        bits = entropy_of(symbols)
        assert 0.09 < bits < 0.11
        assert 8 * payload.size <= 1.02 * bits * n
        np.testing.assert_array_equal(decoded(payload, 3, n), symbols)


def test_a_message_of_one_symbol_takes_next_to_nothing_however_long() -> None:
    for levels in (3, 9, 255):
        assert coded(np.full(1_000_000, levels // 2, np.uint8), levels).size < 64


@pytest.mark.parametrize("levels", [3, 9, 255])
def test_a_short_message_takes_little_beside_its_entropy(levels: int) -> None:
    """Of 5000 signs of which few are there, fewer than 80 bytes: 250 times less than as float32."""
    for n in (1000, 5000, 8192):
        symbols = skewed(n, levels, 0.995)
        occurring = np.unique(symbols).size
        assert coded(symbols, levels).size <= entropy_of(symbols) * n / 8 + 9 + 2 * occurring
        assert coded(symbols, levels).size < n / 62.5 + 25


def test_neighbours_that_depend_on_each_other_take_less_than_their_entropy() -> None:
    symbols = np.repeat(skewed(200_000, 9, 0.5), 2)
    assert 8 * coded(symbols, 9).size < 0.6 * entropy_of(symbols) * symbols.size


@pytest.mark.parametrize("levels", [2, 3, 5, 15])
def test_neighbours_that_are_not_expected_are_named(levels: int) -> None:
    """Symbols that know nothing of their neighbours, but at a few places, where all are there in a row."""
    symbols = skewed(20_000, levels, 0.98)
    symbols[5000 : 5000 + 8 * levels] = np.tile(np.arange(levels), 8)
    payload = coded(symbols, levels)
    assert payload[0] == entropy.BY_SYMBOLS
    np.testing.assert_array_equal(decoded(payload, levels, symbols.size), symbols)
    assert reference.decode(payload.tobytes(), levels, symbols.size) == symbols.tolist()


def test_frequencies_by_symbols_that_leave_out_what_occurs_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols, found = skewed(20_000, 3, 0.98), entropy._by_symbols

    def one_too_few(*arguments: Any) -> NDArray[np.int64]:
        frequencies = found(*arguments)
        commonest = frequencies.argmax()
        frequencies[commonest - 1] += frequencies[commonest]
        frequencies[commonest] = 0
        return frequencies

    monkeypatch.setattr(entropy, "_by_symbols", one_too_few)
    payload = coded(symbols, 3)
    assert payload[0] == entropy.CODED
    np.testing.assert_array_equal(decoded(payload, 3, symbols.size), symbols)


def test_rare_neighbours_first_or_last_do_not_spoil_a_message() -> None:
    """The last symbols, which the coder begins with, may take more bytes than it had."""
    for part in (slice(0, 3000), slice(-3000, None)):
        symbols = np.zeros(100_000, np.uint8)
        symbols[part] = np.random.default_rng(3).integers(0, 9, 3000)
        payload = coded(symbols, 9)
        assert payload.size < 3000
        np.testing.assert_array_equal(decoded(payload, 9, symbols.size), symbols)


@pytest.mark.parametrize("levels", [2, 3, 4, 9, 16, 255])
def test_what_cannot_be_compressed_takes_no_more_than_promised(levels: int) -> None:
    symbols = np.random.default_rng(0).integers(0, levels, 10_001).astype(np.uint8)
    payload = coded(symbols, levels)
    together = entropy.symbols_together(levels)
    assert payload.size <= entropy.most_bytes(symbols.size, levels) == 1 + -(-symbols.size // together)
    np.testing.assert_array_equal(decoded(payload, levels, symbols.size), symbols)


def test_a_buffer_may_be_longer_than_needed_and_gives_the_same_message() -> None:
    symbols = skewed(5000, 9, 0.9)
    payload = np.full(2 * entropy.most_bytes(5000, 9), GUARD, np.uint8)
    used = entropy.encode(symbols, 9, payload)
    np.testing.assert_array_equal(payload[:used], coded(symbols, 9))


def test_what_cannot_be_coded_is_refused() -> None:
    symbols = np.zeros(100, np.uint8)
    payload = np.empty(entropy.most_bytes(100, 9), np.uint8)
    with pytest.raises(ValueError, match="100 symbols of 9 levels may take 51 bytes, not 50"):
        entropy.encode(symbols, 9, payload[:-1])
    for place in (0, 95, 96, 99):
        symbols[:] = 0
        symbols[place] = 9
        with pytest.raises(ValueError, match="a symbol is 9, but there are 9 levels"):
            entropy.encode(symbols, 9, payload)
    for levels in (-1, 0, 1, 256):
        with pytest.raises(ValueError, match="takes symbols of 2 to 255 levels"):
            entropy.most_bytes(100, levels)


# Damage --------------------------------------------------------------------------------------------------------------


def harmless(payload: NDArray[np.uint8], levels: int, n: int) -> bool:
    """Return whether a payload was refused; `decoded` checks the rest."""
    try:
        decoded(payload, levels, n)
    except ValueError as error:
        refused = str(error)
    else:
        return False
    assert refused.startswith(f"a payload of {n} symbols of {levels} levels")
    assert refused.endswith("is damaged")
    return True


@pytest.mark.parametrize(("levels", "zero"), [(3, 0.99), (9, 0.9), (9, 0.0), (255, 0.5)])
def test_a_truncated_or_longer_payload_is_refused(levels: int, zero: float) -> None:
    for n in (1003, 9003):
        symbols = skewed(n, levels, zero)
        payload = coded(symbols, levels)
        for size in range(payload.size):
            assert harmless(payload[:size], levels, symbols.size), size
        for more in (1, 2, 3):
            assert harmless(np.append(payload, np.zeros(more, np.uint8)), levels, symbols.size)


@pytest.mark.parametrize(("levels", "zero"), [(3, 0.99), (9, 0.9), (255, 0.5)])
def test_a_flipped_bit_does_no_harm_and_is_nearly_always_noticed(levels: int, zero: float) -> None:
    for n in (4003, 9003):
        symbols = skewed(n, levels, zero)
        payload = coded(symbols, levels)
        assert payload[0] != entropy.PLAIN
        unnoticed = 0
        for bit in range(8 * payload.size):
            damaged = payload.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            unnoticed += not harmless(damaged, levels, symbols.size)
        assert unnoticed < 0.04 * 8 * payload.size  # one rare symbol taken for another


@pytest.mark.parametrize("levels", [3, 9, 15, 100, 255])
def test_plain_bytes_that_are_no_symbols_are_refused(levels: int) -> None:
    symbols = np.zeros(2, np.uint8)
    payload = coded(symbols, levels)
    assert payload[0] == entropy.PLAIN
    payload[-1] = levels ** entropy.symbols_together(levels) - 1
    assert not harmless(payload, levels, symbols.size)
    payload[-1] += 1
    assert harmless(payload, levels, symbols.size)


@given(
    garbage=st.binary(max_size=300),
    mode=st.integers(0, 3),
    levels=st.integers(2, 255),
    n=st.integers(0, 3000) | st.integers(8193, 12_000),
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_any_bytes_do_no_harm(garbage: bytes, mode: int, levels: int, n: int) -> None:
    harmless(np.frombuffer(bytes([mode]) + garbage, np.uint8).copy(), levels, n)


@given(seed=st.integers(0, 2**32), damage=st.integers(1, 40), levels=st.sampled_from(LEVELS))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_sound_frequencies_with_wrong_words_do_no_harm(seed: int, damage: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    symbols = skewed(int(rng.integers(100, 16_000)), levels, rng.random(), seed)
    payload = coded(symbols, levels)
    damage = min(damage, payload.size)
    payload[-damage:] = rng.integers(0, 256, damage)
    harmless(payload, levels, symbols.size)
    harmless(payload, 2 + int(rng.integers(254)), symbols.size)
    harmless(payload, levels, int(rng.integers(18_000)))


# The format ----------------------------------------------------------------------------------------------------------


def test_the_wire_format_is_the_pinned_one() -> None:
    symbols = (np.arange(400) * np.arange(400) // 7 % 41 == 0).astype(np.uint8) * 4 + 4
    assert coded(symbols, 9).tobytes().hex() == PINNED
    assert hashlib.sha256(coded(np.tile(symbols, 25), 9)).hexdigest() == PINNED_LONGER
    longer = (np.arange(100_000) % 97 < 3).astype(np.uint8)
    assert hashlib.sha256(coded(longer, 5)).hexdigest() == PINNED_LONG
    scattered = (np.arange(20_000) ** 2 % 9973 % 101 == 0).astype(np.uint8)
    scattered[777:782] = 2, 1, 2, 1, 2
    assert coded(scattered, 3)[0] == entropy.BY_SYMBOLS
    assert hashlib.sha256(coded(scattered, 3)).hexdigest() == PINNED_BY_SYMBOLS


PINNED = "01eaab4a2709c0f4860987e16a2941583472f529485a"
PINNED_LONGER = "14c2e54d68202015f778f230a2dacf3ba460f060a0f38d31a77e247389271965"
PINNED_LONG = "8c47144e7eaa6f33410c928bed4ab2fc4c86ccdef6b1af555c4f8e30da74317f"
PINNED_BY_SYMBOLS = "5c4fdd7e739d175b4c0dd6308e07329f560947ef419b4f8dbe8b5f90a776bd12"
