"""Counts: the codec contract; merges are sums; majorities with fair coins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.sign import Sign
from mpicomp.codecs.vote_counts import Counts, planes_of
from mpicomp.feedback.majority import MajorityVotes
from mpicomp.feedback.votes import VoteLayout
from mpicomp.kernels.streams import Stream
from tests.contracts import LENGTHS, SignContract, draw_at, encoded, gaussian
from tests.reference import vote_counts as reference
from tests.reference.signs import unpack_bits
from tests.reference.statistics import assert_binomial

Bytes = NDArray[np.uint8]


def payload_of(counts: NDArray[Any], weight: int) -> Bytes:
    return reference.planes(counts, planes_of(weight)).view(np.uint8)


def merged(parts: list[tuple[Bytes, int]], n: int) -> Bytes:
    """All payloads, each with its weight, added up one after the other."""
    held, weight = parts[0]
    for incoming, more in parts[1:]:
        room = np.full(Counts().nbytes(n, weight + more), 0xA5, np.uint8)
        room[: held.size] = held
        Counts().merge(room, incoming, n, held_weight=weight, incoming_weight=more, draw=draw_at())
        held, weight = room, weight + more
    return held


class TestCounts(SignContract):
    codec = Counts()

    def test_bit_length_expansion(self) -> None:
        assert [planes_of(weight) for weight in (1, 2, 3, 4, 7, 8, 15, 16, 255, 256)] == [1, 2, 2, 3, 3, 4, 4, 5, 8, 9]
        for n in (0, 1, 64, 65, 4096):
            for weight in (1, 2, 3, 8, 100):
                assert self.codec.nbytes(n, weight) == 8 * int(np.ceil(n / 64)) * int(np.ceil(np.log2(weight + 1)))

    def test_one_rank_s_counts_are_its_packed_signs(self) -> None:
        values = gaussian(200)
        values[::3] = 0
        for step in (0, 1):
            at = draw_at(step)
            np.testing.assert_array_equal(encoded(self.codec, values, at), encoded(Sign(), values, at))

    def test_wire_format_is_pinned(self) -> None:
        payload = merged([(encoded(self.codec, row), 1) for row in np.array([[1, 1, 1, -1], [1, 1, -1, -1.0]])], 4)
        np.testing.assert_array_equal(payload, [0b0100, *[0] * 7, 0b0011, *[0] * 7])

    def test_merged_counts_decode_to_the_mean_of_the_signs(self) -> None:
        for n in LENGTHS:
            for weight in (2, 3, 5, 8):
                rows = [gaussian(n, seed=rank) for rank in range(weight)]
                payload = merged([(encoded(self.codec, row), 1) for row in rows], n)
                assert payload.size == self.codec.nbytes(n, weight)
                total = np.sum([np.where(row > 0, 1, -1) for row in rows], axis=0)
                for dtype in self.dtypes:
                    values = np.empty(n, dtype)
                    self.codec.decode(payload, values, weight=weight)
                    np.testing.assert_array_equal(values, total.astype(dtype) * dtype(1 / weight))

    def test_damaged_counts_above_the_weight_decode_to_finite_values(self) -> None:
        for weight in (2, 4, 5, 8, 1000):
            for dtype in self.dtypes:
                values = np.full(130, 77, dtype)
                self.codec.decode(np.full(self.codec.nbytes(130, weight), 0xFF, np.uint8), values, weight=weight)
                assert (np.abs(values) < 4).all()

    def test_payloads_of_wrong_size_do_not_merge(self) -> None:
        three, six = (payload_of(np.zeros(70, int), weight) for weight in (3, 6))
        for held, incoming in ((six, three[:-8]), (six[:-8], three), (three, three), (six, six)):
            with pytest.raises(ValueError, match="damaged"):
                Counts().merge(held.copy(), incoming, 70, held_weight=3, incoming_weight=3, draw=draw_at())


N = 200_000


def majority(counts: NDArray[Any], weight: int, step: int = 3, first: int = 0, seed: int = 11) -> NDArray[np.bool_]:
    """Return elements from `first` on, as `MajorityVotes` decides them in the place of the first plane."""
    planes = reference.planes(counts, planes_of(weight))
    cut = range(first, first + counts.size)
    codec = MajorityVotes(VoteLayout([cut], [planes], "float32", weight), Stream(seed, 0, "test"))
    nothing = np.empty(0, np.float32)
    codec.begin(SimpleNamespace(step=step, values=nothing, out=nothing, wide=None))
    codec.decide(0)
    return unpack_bits(planes, counts.size)


def test_ties_are_decided_by_fair_coins_of_step_seed_and_place() -> None:
    ties = np.full(N, 4)
    first = majority(ties, 8)
    assert_binomial(first.sum(), N, 0.5, "positive ties")
    for other in ({"step": 4}, {"seed": 12}, {"first": 1 << 18}):
        assert_binomial((majority(ties, 8, **other) == first).sum(), N, 0.5, f"equal coins with {other}")


def test_parts_are_decided_as_their_part_of_the_whole() -> None:
    counts = np.random.default_rng(1).integers(0, 5, 3 * 4096 + 70)
    whole = majority(counts, 4)
    for start in (512, 4096, 3 * 4096):
        np.testing.assert_array_equal(majority(counts[start:], 4, first=start), whole[start:])
    ups = reference.coins(draw_at().stream, counts.size, 3)
    np.testing.assert_array_equal(whole, (counts > 2) | ((counts == 2) & ups))
