"""Sign: the codec contract, and merges that are the sign of a uniformly random rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs import Sign
from tests.contracts import SignContract, draw_at, encoded, gaussian
from tests.reference.signs import unpack_bits
from tests.reference.statistics import assert_binomial

Bytes = NDArray[np.uint8]

N = 200_000
YES, NO = np.full(-(-N // 64) * 8, 0xFF, np.uint8), np.zeros(-(-N // 64) * 8, np.uint8)


def merged(held: Bytes, incoming: Bytes, weights: tuple[int, int], **at: Any) -> Bytes:
    result = held.copy()
    Sign().merge(result, incoming, N, incoming_weight=weights[0], held_weight=weights[1], draw=draw_at(**at))
    return result


def positives(payload: Bytes) -> int:
    return int(unpack_bits(payload.view(np.uint64), N).sum())


class TestSign(SignContract):
    codec = Sign()

    def test_one_bit_per_element_rounded_up_to_whole_words(self) -> None:
        assert [self.codec.nbytes(n, weight=5) for n in (0, 1, 64, 65, 4096)] == [0, 8, 8, 16, 512]

    def test_wire_format_is_pinned(self) -> None:
        values = gaussian(70)
        values[:4] = 1, -1, 1, 1
        payload = encoded(self.codec, values)
        assert payload[0] & 15 == 0b1101
        np.testing.assert_array_equal(unpack_bits(payload.view(np.uint64), 70), values > 0)
        assert payload[8] >> 6 == 0
        assert not payload[9:].any()

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_every_float_width_decodes(self, dtype: Any) -> None:
        values = gaussian(100)
        np.testing.assert_array_equal(self.decoded(encoded(self.codec, values), 100, dtype), np.sign(values))

    def test_zeros_alternate_from_step_to_step(self) -> None:
        zeros = np.zeros(130, np.float32)
        even, odd = (self.decoded(encoded(self.codec, zeros, draw_at(step)), 130) for step in (0, 1))
        np.testing.assert_array_equal(even, np.where(np.arange(130) % 2, 1, -1))
        np.testing.assert_array_equal(odd, -even)

    def test_chunks_encode_as_their_part_of_the_whole(self) -> None:
        values = gaussian(3 * self.codec.alignment + 70)
        values[::3] = 0
        whole = encoded(self.codec, values, draw_at(1))
        for start in (0, self.codec.alignment, 3 * self.codec.alignment):
            np.testing.assert_array_equal(
                encoded(self.codec, values[start:], draw_at(1, offset=start)), whole[start // 8 :]
            )

    def test_payloads_of_wrong_size_do_not_merge(self) -> None:
        for held, incoming in ((YES[:-8], NO), (YES, NO[:-8]), (YES[:-1], NO)):
            with pytest.raises(ValueError, match="damaged"):
                Sign().merge(held.copy(), incoming, N, held_weight=1, incoming_weight=1, draw=draw_at())


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (3, 2), (1, 6), (5, 11)])
def test_incoming_bit_wins_in_proportion_to_its_weight(weights: tuple[int, int]) -> None:
    p = weights[0] / sum(weights)
    assert_binomial(positives(merged(NO, YES, weights)), N, p)
    assert_binomial(positives(merged(YES, NO, weights)), N, 1 - p)


def test_unanimous_bits_never_flip() -> None:
    values = gaussian(N)
    payload = encoded(Sign(), values)
    np.testing.assert_array_equal(merged(payload, payload, (3, 4)), payload)


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_each_rank_of_a_chain_wins_equally_often(ranks: int) -> None:
    for voter in range(ranks):
        state = YES if voter == 0 else NO
        for rank in range(1, ranks):
            state = merged(YES if voter == rank else NO, state, (rank, 1), rank=rank)
        assert_binomial(positives(state), N, 1 / ranks, f"wins of rank {voter}")


def test_merges_of_one_rank_into_the_same_elements_use_different_words() -> None:
    """2 x 2 torus: a rank merges weight 1 into 1, then 2 into 2. With one word for both, ranks win unequally."""
    for voter in range(4):
        votes = [YES if voter == rank else NO for rank in range(4)]
        here, there = merged(votes[0], votes[1], (1, 1), rank=0), merged(votes[2], votes[3], (1, 1), rank=2)
        assert_binomial(positives(merged(here, there, (2, 2), rank=0, ordinal=1)), N, 1 / 4, f"wins of rank {voter}")


def test_chunks_merge_as_their_part_of_the_whole() -> None:
    rng = np.random.default_rng(1)
    held, incoming = (rng.integers(0, 256, NO.size, np.uint8) for _ in range(2))
    whole = merged(held, incoming, (2, 3))
    cut = 3 * Sign().alignment
    for start, stop in ((0, cut), (cut, N)):
        words = slice(start // 8, -(-stop // 64) * 8)
        part = held[words].copy()
        Sign().merge(part, incoming[words], stop - start, incoming_weight=2, held_weight=3, draw=draw_at(offset=start))
        np.testing.assert_array_equal(part, whole[words])
