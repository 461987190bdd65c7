"""Elias codes: the codec contract, the codes bit by bit, their size, and any damage is an error or a wrong value."""

from __future__ import annotations

import ctypes
import mmap
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpicomp.codecs.elias_counts import DELTA, FIXED, GAMMA, HEADER, MOST_WEIGHT, Elias, message_bytes, scratch, tables
from mpicomp.codecs.vote_counts import Counts, planes_of
from tests.contracts import LENGTHS, SignContract, encoded, guarded
from tests.reference import vote_counts as reference

Bytes = NDArray[np.uint8]
ELIAS = Elias()
WEIGHTS = (1, 2, 3, 4, 7, 8, 9, 31, 100, 300)


def coins(n: int, weight: int) -> NDArray[np.int64]:
    """Counts of ranks that throw fair coins."""
    return np.random.default_rng((n, weight)).binomial(weight, 0.5, n)


def written(counts: NDArray[Any], weight: int) -> Bytes:
    """The message of these counts, in memory of just the size that is asked for."""
    n = counts.size
    planes = reference.planes(counts, planes_of(weight))
    with guarded(ELIAS.nbytes(n, weight), np.uint8) as room:
        nbytes = ELIAS.write(planes, n, weight, room, scratch(n))
    np.testing.assert_array_equal(planes, reference.planes(counts, planes_of(weight)))
    return room[:nbytes]


def read(message: Bytes, n: int, weight: int) -> NDArray[np.int64]:
    """The counts of a message, read into guarded memory."""
    with guarded(Counts().nbytes(n, weight) // 8, np.uint64) as planes, guarded(n, np.uint16) as work:
        ELIAS.read(message, n, weight, planes, work)
    return reference.from_planes(planes, n, planes_of(weight))


def coding_of(message: Bytes) -> int:
    return int(message[:4].view("<u4")[0])


class TestElias(SignContract):
    codec = Elias()

    def test_one_rank_s_message_is_a_header_and_its_packed_signs(self) -> None:
        values = np.random.default_rng(0).standard_normal(70).astype(np.float32)
        payload = encoded(self.codec, values)
        np.testing.assert_array_equal(payload[:HEADER].view("<u4"), [FIXED, 16])
        np.testing.assert_array_equal(payload[HEADER:], encoded(Counts(), values))

    def test_messages_decode_to_the_mean_of_the_signs(self) -> None:
        for n in LENGTHS:
            for weight in (2, 8):
                counts = coins(n, weight)
                for dtype in self.dtypes:
                    values = np.full(n, 77, dtype)
                    self.codec.decode(written(counts, weight), values, weight=weight)
                    np.testing.assert_array_equal(values, (2 * counts - weight).astype(dtype) * dtype(1 / weight))


@pytest.mark.parametrize("weight", [2, 3, 4, 8, 9, 300])
def test_numbers_go_from_the_mode_outwards_and_codes_are_elias(weight: int) -> None:
    known = tables(weight)
    for count in range(weight + 1):
        number = reference.number(count, weight)
        assert known.values[number] == count
        for coding, code in ((GAMMA, reference.gamma), (DELTA, reference.delta)):
            text = code(number)
            assert known.lengths[coding][count] == len(text)
            assert known.codes[coding][count] == sum(1 << i for i, bit in enumerate(text) if bit == "1")


def test_published_codes() -> None:
    """The first numbers' codes as Elias gives them, but for the order of the digits below the leading one."""
    assert [reference.gamma(x) for x in (1, 2, 3, 4)] == ["1", "010", "011", "00100"]
    assert [reference.delta(x) for x in (1, 2, 3, 4, 8)] == ["1", "0100", "0101", "01100", "00100000"]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_what_is_written_is_read_and_as_long_as_the_shortest_way(weight: int) -> None:
    for n in LENGTHS:
        rng = np.random.default_rng(n)
        for counts in (coins(n, weight), rng.integers(0, weight + 1, n), np.full(n, weight // 2), np.full(n, weight)):
            message = written(counts, weight)
            assert message.size == message_bytes(message) == reference.message_bytes(counts, weight)
            np.testing.assert_array_equal(read(message, n, weight), counts)


@pytest.mark.parametrize(("weight", "coding", "code"), [(8, GAMMA, reference.gamma), (4000, DELTA, reference.delta)])
def test_wire_format_is_pinned(weight: int, coding: int, code: Any) -> None:
    counts = coins(1000, weight)
    message = written(counts, weight)
    body = reference.stream_of([code(reference.number(int(k), weight)) for k in counts])
    np.testing.assert_array_equal(message[:HEADER].view("<u4"), [coding, body.size])
    np.testing.assert_array_equal(message[HEADER:], body)


def test_fair_coins_take_three_bits_for_eight_ranks_and_the_fixed_width_for_three() -> None:
    def expected(weight: int) -> float:
        """Bits of a gamma code."""
        terms = (comb(weight, k) * int(tables(weight).lengths[GAMMA][k]) for k in range(weight + 1))
        return sum(terms) / 2**weight

    assert (round(expected(8), 2), expected(3), expected(4)) == (3.05, 2.5, 2.5)
    n = 200_000
    for weight, bits, coding in ((8, expected(8), GAMMA), (4, 2.5, GAMMA), (3, 2, FIXED), (2, 2, FIXED)):
        message = written(coins(n, weight), weight)
        assert coding_of(message) == coding
        assert 8 * message.size / n == pytest.approx(bits, rel=0.01)


def test_more_ranks_than_codes_reach_travel_in_fixed_width() -> None:
    counts = np.full(100, MOST_WEIGHT // 2)
    assert coding_of(written(counts, MOST_WEIGHT)) == GAMMA
    beyond = written(counts, MOST_WEIGHT + 1)
    assert coding_of(beyond) == FIXED
    np.testing.assert_array_equal(read(beyond, 100, MOST_WEIGHT + 1), counts)


def test_counts_above_the_weight_are_written_within_bounds() -> None:
    for weight in (2, 4, 5, 8):
        top = np.full(1000, (1 << planes_of(weight)) - 1)
        message = written(top, weight)
        assert read(message, 1000, weight).max() <= top[0]


# Damage -------------------------------------------------------------------------------------------------------------

CODED = {GAMMA: (coins(300, 8), 8), DELTA: (coins(300, 4000), 4000), FIXED: (coins(300, 3), 3)}


def survives(message: Bytes, n: int, weight: int) -> None:
    """An error or counts; `read` looks after what is beyond."""
    try:
        found = read(message, n, weight)
    except ValueError:
        pass
    else:
        assert found.max(initial=0) <= (weight if coding_of(message) else (1 << planes_of(weight)) - 1)


@pytest.mark.parametrize("coding", CODED)
def test_cut_off_messages_are_refused_wherever_they_end(coding: int) -> None:
    counts, weight = CODED[coding]
    message = written(counts, weight)
    assert coding_of(message) == coding
    for length in range(message.size):
        with pytest.raises(ValueError, match="damaged"):
            read(message[:length].copy(), counts.size, weight)
        if length >= HEADER and length % 8 == 0:
            shortened = message[:length].copy()
            shortened[4:8].view("<u4")[0] = length - HEADER
            with pytest.raises(ValueError, match="damaged"):
                read(shortened, counts.size, weight)


def message_of(coding: int, bits: str) -> Bytes:
    """A message with this stream of bits, zeros behind it up to 64 of them."""
    body = reference.stream_of([bits])
    return np.concatenate([np.array([coding, body.size], np.uint32).view(np.uint8), body])


def test_codes_that_no_count_has_are_refused() -> None:
    for weight in (2, 8, 300):
        for coding, code in ((GAMMA, reference.gamma), (DELTA, reference.delta)):
            assert read(message_of(coding, code(weight + 1)), 1, weight)[0] in (0, weight)
            for number in (weight + 2, weight + 3, 2 * weight + 3, 1000, 30_000):
                with pytest.raises(ValueError, match="damaged"):
                    read(message_of(coding, code(number)), 1, weight)
    for digits in (17, 32, 33, 64, 65, 70):
        with pytest.raises(ValueError, match="damaged"):
            read(message_of(DELTA, reference.gamma(digits)), 1, 8)
    with pytest.raises(ValueError, match="damaged"):
        read(message_of(GAMMA, "0" * 16 + "1" * 48), 1, 8)


def test_a_last_code_that_goes_beyond_the_end_is_refused() -> None:
    for bits in ("1" * 61 + "001", "1" * 62 + "01", "1" * 63 + "0"):
        with pytest.raises(ValueError, match="damaged"):
            read(message_of(GAMMA, bits), bits.index("0") + 1, 8)
        assert (read(message_of(GAMMA, bits), bits.index("0"), 8) == 4).all()


def test_nothing_is_read_behind_the_end() -> None:
    """The message ends where memory that may not be read begins."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    whole = np.frombuffer(memory, np.uint8)
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + page), ctypes.c_size_t(page), 0)
    for coding in (GAMMA, DELTA):
        message = message_of(coding, "1" * 64)
        whole[page - message.size : page] = message
        there = whole[page - message.size : page]
        assert (read(there, 64, 8) == 4).all()
        with pytest.raises(ValueError, match="damaged"):
            read(there, 10_000, 8)


@pytest.mark.parametrize("coding", CODED)
def test_every_flipped_bit_is_survived(coding: int) -> None:
    counts, weight = CODED[coding]
    message = written(counts, weight)
    for bit in range(8 * message.size):
        damaged = message.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        survives(damaged, counts.size, weight)


@given(
    coding=st.sampled_from([FIXED, GAMMA, DELTA, 3, 2**32 - 1]),
    body=st.binary(max_size=400),
    length=st.one_of(st.none(), st.integers(0, 2**32 - 1)),
    n=st.integers(0, 500),
    weight=st.sampled_from([1, 2, 3, 8, 300, MOST_WEIGHT, MOST_WEIGHT + 1]),
)
def test_any_bytes_are_survived(coding: int, body: bytes, length: int | None, n: int, weight: int) -> None:
    message = np.zeros(HEADER + len(body), np.uint8)
    message[:HEADER].view(np.uint32)[:] = coding, len(body) if length is None else length
    message[HEADER:] = np.frombuffer(body, np.uint8)
    survives(message, n, weight)


@given(data=st.data(), weight=st.sampled_from([2, 8, 9, 300, MOST_WEIGHT]), n=st.integers(1, 400))
def test_streams_of_any_words_are_survived(data: st.DataObject, weight: int, n: int) -> None:
    """Whole 64-bit words, as the reader wants them, sparse in ones: long codes, and ends in the middle of one."""
    count = data.draw(st.integers(0, 12))
    sparse = st.integers(0, 2**64 - 1).map(lambda word: word & word >> 13 & word >> 29)
    words = np.array([data.draw(sparse) for _ in range(count)], np.uint64)
    message = np.zeros(HEADER + 8 * count, np.uint8)
    message[:HEADER].view(np.uint32)[:] = data.draw(st.sampled_from([GAMMA, DELTA])), 8 * count
    message[HEADER:] = words.view(np.uint8)
    survives(message, n, weight)
