"""The laws of shared selection, within bounds that chance breaks once in 10^9.

Most tests look at who won, which they read off results: in payload number p each rank's signs are bit p of its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.shared_selection import SharedSelection
from mpicomp.kernels.streams import Stream
from tests.reference.signs import pack_bits, unpack_bits
from tests.reference.statistics import ERROR, assert_binomial, assert_chi_square

RANKS = (2, 3, 4, 5, 7, 8, 11, 17)
COLUMNS = 512
ROW = COLUMNS // 64
GROUPS = 400
PLACE = {"seed": 1, "vector_id": 0, "purpose": "selection", "step": 0, "group": 0}
# everything that distinguishes two draws, one at a time
ELSEWHERE = [
    {"seed": 2},
    {"vector_id": 1},
    {"purpose": "merge"},
    {"step": 1},
    {"step": 2**31},
    {"group": GROUPS},
    {"group": 2**30},
]

Words = NDArray[np.uint64]


def votes_on(packed: Sequence[Words], n: int, votes: int, **changed: Any) -> Words:
    """The winners' signs [votes, words], packed, of all ranks' signs."""
    at = PLACE | changed
    ranks = len(packed)
    codec = SharedSelection(ranks, votes)
    selection = codec.bind("cpu", Stream(at["seed"], at["vector_id"], at["purpose"]))
    size = codec.nbytes(n) // 8
    winners, payloads = selection.reserve(n), np.empty((ranks, size), np.uint64)
    selection.draw(winners, at["step"], COLUMNS * ranks * at["group"])
    for rank, bits in enumerate(packed):
        selection.encode(bits, rank, winners, payloads[rank])
    results = np.empty((codec.votes, -(-n // 64)), np.uint64)
    selection.decode(payloads.reshape(-1), size, winners, list(results))
    return results


def votes_of_groups(positive: Sequence[bool], groups: int, votes: int, **changed: Any) -> Words:
    """The same where a rank has one sign on all elements: [votes, group, row, word]."""
    n = COLUMNS * len(positive) * groups
    both = np.zeros(n // 64, np.uint64), np.full(n // 64, 2**64 - 1, np.uint64)
    return votes_on([both[sign] for sign in positive], n, votes, **changed).reshape(-1, groups, len(positive), ROW)


def winners_of(
    ranks: int, votes: int = 1, groups: int = GROUPS, rows: Any = slice(None), words: int = ROW, **changed: Any
) -> NDArray[np.int64]:
    """Who wins, in some rows and the first words of them: [votes, group, row, column]."""
    found = np.int64(0)
    for p in range((ranks - 1).bit_length()):
        bits = votes_of_groups([bool(rank >> p & 1) for rank in range(ranks)], groups, votes, **changed)
        found = found + (unpacked(bits[:, :, rows, :words]).astype(np.int64) << p)
    return np.asarray(found)


def unpacked(words: Words) -> NDArray[np.bool_]:
    """The last axis' words as bits."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little").astype(bool)


def assert_pairs(one: NDArray[Any], other: NDArray[Any], ranks: int, what: str) -> None:
    """Fail unless all pairs are equally frequent; no two may share an event."""
    counts = np.bincount((ranks * one + other).reshape(-1), minlength=ranks * ranks)
    assert_chi_square(counts, np.full(ranks * ranks, one.size / ranks**2), what)


@pytest.mark.parametrize("ranks", RANKS)
class TestOneWinner:
    def test_each_rank_wins_each_column_of_a_group_once(self, ranks: int) -> None:
        (who,) = winners_of(ranks, groups=20)
        np.testing.assert_array_equal(np.sort(who, axis=1), np.broadcast_to(np.arange(ranks)[:, None], who.shape))

    def test_all_ranks_win_equally_often(self, ranks: int) -> None:
        """In a group's first row, where winners are independent; overall and in each column."""
        who = winners_of(ranks, rows=0)[0]
        for rank in range(ranks):
            wins = who == rank
            assert_binomial(wins.sum(), wins.size, 1 / ranks, f"wins of rank {rank}")
            assert_binomial(wins.sum(axis=0), GROUPS, 1 / ranks, f"wins of rank {rank} in column")

    def test_the_result_is_positive_as_often_as_the_ranks_are(self, ranks: int) -> None:
        """P(+) = k/M for elements on which k of M ranks are positive, in whichever row."""
        n = COLUMNS * ranks * 100
        positive = np.random.default_rng(ranks).integers(0, 2, (ranks, n)).astype(bool)
        result = unpack_bits(votes_on([pack_bits(row) for row in positive], n, 1)[0], n).reshape(-1, ranks, COLUMNS)
        agreeing = positive.sum(axis=0).reshape(result.shape)
        for row in {0, 1, ranks - 1}:
            for k in range(ranks + 1):
                chosen = result[:, row][agreeing[:, row] == k]
                assert_binomial(chosen.sum(), chosen.size, k / ranks, f"{k} of {ranks} in row {row}")

    def test_winners_of_two_columns_and_of_two_groups_are_independent(self, ranks: int) -> None:
        """Columns of one row and of different rows."""
        both = winners_of(ranks, rows=[0, ranks - 1])[0]
        who = both[:, 0]
        for distance in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256):
            pairs = who[:, : COLUMNS // (2 * distance) * 2 * distance].reshape(GROUPS, -1, 2, distance)
            assert_pairs(pairs[:, :, 0], pairs[:, :, 1], ranks, f"columns {distance} apart")
        for distance in (1, 64):
            pairs = both.reshape(GROUPS, 2, -1, 2, distance)
            assert_pairs(pairs[:, 0, :, 0], pairs[:, 1, :, 1], ranks, f"columns {distance} apart, other rows")
        for distance in (1, 8, 64):
            groups = who[: GROUPS // (2 * distance) * 2 * distance].reshape(-1, 2, distance, COLUMNS)
            assert_pairs(groups[:, 0], groups[:, 1], ranks, f"groups {distance} apart")

    def test_winners_elsewhere_are_independent(self, ranks: int) -> None:
        here = winners_of(ranks, rows=0)[0]
        for changed in ELSEWHERE:
            assert_pairs(here, winners_of(ranks, rows=0, **changed)[0], ranks, f"pairs with {changed}")


@pytest.mark.parametrize("ranks", [ranks for ranks in RANKS if ranks > 2])
class TestTwoWinners:
    """The winners of a group share a distance: where counts must be of independent events, a group gives one."""

    GROUPS = 6000

    def test_the_first_winners_are_those_of_one(self, ranks: int) -> None:
        np.testing.assert_array_equal(winners_of(ranks, 2, 20)[0], winners_of(ranks, 1, 20)[0])

    def test_they_are_two_ranks_at_the_group_s_distance(self, ranks: int) -> None:
        first, second = winners_of(ranks, 2, 200)
        distances = (second - first) % ranks
        assert (distances == distances[:, :1, :1]).all()
        assert set(np.unique(distances)) == set(range(1, ranks))

    def test_every_pair_of_ranks_is_as_frequent(self, ranks: int) -> None:
        first, second = self.of_groups(ranks)
        counts = np.bincount(ranks * first + second, minlength=ranks * ranks).reshape(ranks, ranks)
        assert not counts.diagonal().any()
        expected = np.full(ranks * (ranks - 1), self.GROUPS / (ranks * (ranks - 1)))
        assert_chi_square(counts[~np.eye(ranks, dtype=bool)], expected, "pairs of winners")

    def test_distances_of_two_groups_and_of_two_steps_are_independent(self, ranks: int) -> None:
        here, there = (np.diff(self.of_groups(ranks, step), axis=0)[0] % ranks - 1 for step in (0, 1))
        assert_pairs(here[::2], here[1::2], ranks - 1, "distances of neighbouring groups")
        assert_pairs(here, there, ranks - 1, "distances of two steps")

    def of_groups(self, ranks: int, step: int = 0) -> NDArray[np.int64]:
        """First and second winner of the first column of each group: [2, group]."""
        return winners_of(ranks, 2, self.GROUPS, rows=0, words=1, step=step)[..., 0]

    def test_votes_have_the_probabilities_of_two_drawn_without_replacement(self, ranks: int) -> None:
        for k in {1, ranks // 2, ranks - 1}:
            votes = unpacked(votes_of_groups([rank < k for rank in range(ranks)], self.GROUPS, 2)[:, :, 0, :1])
            positive, less, pairs = votes[..., 7].sum(axis=0), ranks - k, ranks * (ranks - 1)
            for count, ways in enumerate((less * (less - 1), 2 * k * less, k * (k - 1))):
                assert_binomial((positive == count).sum(), self.GROUPS, ways / pairs, f"{count} + of {k} in {ranks}")

    def test_the_mean_of_two_has_the_documented_part_of_one_vote_s_variance(self, ranks: int) -> None:
        """(M - 2) / (2 (M - 1)); the bound is Hoeffding's."""
        for k in range(1, ranks):
            positive = [rank < k for rank in range(ranks)]
            signs = 2.0 * unpacked(votes_of_groups(positive, self.GROUPS, 2)[:, :, 0, :1])[..., 7] - 1
            mean = 2 * k / ranks - 1
            spread = (signs.mean(axis=0) - mean) ** 2
            expected = (1 - mean**2) * (ranks - 2) / (2 * (ranks - 1))
            bound = (1 + abs(mean)) ** 2 * math.sqrt(math.log(2 / ERROR) / (2 * self.GROUPS))
            assert abs(spread.mean() - expected) <= bound

    def test_votes_of_two_columns_are_independent(self, ranks: int) -> None:
        """So sums over elements have the variance of independent ones, though a group's share a distance."""
        first, second = winners_of(ranks, 2, rows=0)
        for distance in (1, 64):
            one, other = (who.reshape(GROUPS, -1, 2, distance) for who in (first, second))
            assert_pairs(one[:, :, 0], other[:, :, 1], ranks, f"first and second winners {distance} apart")
            assert_pairs(other[:, :, 0], other[:, :, 1], ranks, f"second winners {distance} apart")


@pytest.mark.parametrize("votes", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_unanimous_signs_never_flip(ranks: int, votes: int) -> None:
    for n in (1, 65, 64 * ranks + 1, 100_003):
        signs = pack_bits(np.random.default_rng(n).integers(0, 2, n).astype(bool))
        for result in votes_on([signs] * ranks, n, votes):
            np.testing.assert_array_equal(result, signs)
