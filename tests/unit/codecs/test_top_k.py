"""TopK and RandomSparsification: the codec contract, kept values, and damage."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from mpicomp.codecs.base import sent_bytes
from mpicomp.codecs.top_k import RandomSparsification, TopK, count_kept
from tests.contracts import (
    LENGTHS,
    CompressorContract,
    check_several_at_once,
    draw_at,
    encoded,
    gaussian,
    guarded,
)
from tests.reference import compressors
from tests.reference.sparse import top, within_chunks
from tests.reference.statistics import assert_binomial
from tests.reference.vote_counts import planes


class TopKContract(CompressorContract):
    codec: ClassVar[TopK]

    def test_wire_format_is_pinned(self) -> None:
        values = gaussian(1000, np.float64)
        payload = encoded(self.codec, values)
        chunk, keep, kind = self.codec.elements, self.codec.keep, np.float64 if self.codec.double else np.float32
        places = top(values, chunk, keep)
        chosen = values[places].astype(kind)
        bits = (chunk - 1).bit_length()
        header = -(-chosen.nbytes // 8) * 8
        assert payload.size == self.codec.nbytes(1000) == header + 8 * bits * -(-places.size // 64)
        np.testing.assert_array_equal(payload[: chosen.nbytes].view(kind), chosen)
        assert not payload[chosen.nbytes : header].any()
        expected = planes(within_chunks(places, 1000, chunk, keep), bits)
        np.testing.assert_array_equal(payload[header:].view(np.uint64), expected)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_feedback_in_fewer_passes_has_the_bits_of_the_single_steps(self, dtype: type) -> None:
        for n in LENGTHS:
            check_several_at_once(self.codec, n, dtype)

    def test_chunks_encode_as_their_part_of_the_whole(self) -> None:
        start = self.codec.alignment
        values = gaussian(2 * start + 33)
        decoded = self.decoded(encoded(self.codec, values), values.size)
        for cut in (start, 2 * start):
            part = self.decoded(encoded(self.codec, values[cut:], draw_at(offset=cut)), values.size - cut)
            np.testing.assert_array_equal(part, decoded[cut:])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_damaged_value_counts_as_zero(self, bad: float) -> None:
        values = gaussian(300)
        payload = encoded(self.codec, values)
        kind = np.float64 if self.codec.double else np.float32
        payload[: kind().itemsize].view(kind)[0] = bad
        expected = self.decoded(encoded(self.codec, values), 300)
        expected[top(values, self.codec.elements, self.codec.keep)[0]] = 0
        np.testing.assert_array_equal(self.decoded(payload, 300), expected)
        sums = np.zeros(300, np.float32)
        self.codec.add(payload, sums)
        np.testing.assert_array_equal(sums, expected)

    def test_damaged_places_write_inside_the_vector_alone(self) -> None:
        n = 130
        payload = encoded(self.codec, gaussian(n))
        header = payload.size - 8 * (self.codec.elements - 1).bit_length() * -(
            -count_kept(n, self.codec.elements, self.codec.keep) // 64
        )
        payload[header:] = 0xFF
        with guarded(n, np.float32) as values:
            self.codec.decode(payload, values, weight=1)
            self.codec.add(payload, values)


class TestTopOne(TopKContract):
    codec = TopK(10)


class TestTopOneOfAHundred(TopKContract):
    codec = TopK()


class TestTopSeveral(TopKContract):
    codec = TopK(10, chunk=70)


class TestTopDouble(TopKContract):
    codec = TopK(20, chunk=60, double=True)

    def test_values_beyond_the_result_are_held_at_its_largest(self) -> None:
        payload = encoded(self.codec, np.array([1e300, -1e300] * 30))
        assert np.abs(self.decoded(payload, 60)).max() == np.finfo(np.float32).max


class TestTopAll(TopKContract):
    codec = TopK(1)


def test_float64_values_beyond_float32_are_held_at_its_largest() -> None:
    payload = encoded(TopK(4), np.array([1.0, -1e300, 2.0, 3.0]))
    values = np.empty(4)
    TopK(4).decode(payload, values, weight=1)
    np.testing.assert_array_equal(values, [0, -np.finfo(np.float32).max, 0, 0])


class TestRandomQuarter(CompressorContract):
    codec = RandomSparsification(0.25)

    def test_the_kept_are_those_of_the_documented_words(self) -> None:
        values, draw = gaussian(3000), draw_at(step=9, rank=4, ordinal=2, offset=512 * 7)
        chosen = compressors.chosen(draw, 3000, self.codec.p)
        payload = encoded(self.codec, values, draw)
        np.testing.assert_array_equal(self.decoded(payload, 3000) != 0, chosen)
        assert payload[:8].view(np.uint32).tolist() == list(draw.stream.key())
        assert payload[8:16].view(np.uint32).tolist() == [9, int(draw.source)]
        assert payload[16:32].view(np.uint64).tolist() == [7, int(chosen.sum())]


class TestRandomHundredth(CompressorContract):
    codec = RandomSparsification()

    def test_quotients_beyond_float32_are_held_at_its_largest(self) -> None:
        values = np.where(np.arange(2000) % 2, 3e38, -3e38).astype(np.float32)
        decoded = self.decoded(encoded(self.codec, values), 2000)
        assert decoded.any()
        np.testing.assert_array_equal(decoded[decoded != 0], np.sign(values[decoded != 0]) * np.finfo(np.float32).max)

    def test_its_mean_is_the_value(self) -> None:
        n, steps = 20_000, 50
        kept_in_all = 0
        for step in range(steps):
            decoded = self.decoded(encoded(self.codec, np.ones(n, np.float32), draw_at(step)), n)
            assert set(np.unique(decoded)) == {0, np.float32(100)}
            kept_in_all += int((decoded != 0).sum())
        assert_binomial(kept_in_all, n * steps, 0.01)

    def test_ranks_steps_and_chunks_draw_differently(self) -> None:
        ones = np.ones(1 << 16, np.float32)
        first = self.decoded(encoded(self.codec, ones, draw_at()), ones.size)
        for other in (draw_at(4), draw_at(rank=2), draw_at(ordinal=1), draw_at(offset=1 << 16), draw_at(seed=12)):
            second = self.decoded(encoded(self.codec, ones, other), ones.size)
            assert_binomial(((first != 0) & (second != 0)).sum(), ones.size, 1e-4, "kept twice")

    def test_size_is_bounded_by_chance_and_told(self) -> None:
        n = 1_000_000
        payload = encoded(self.codec, gaussian(n))
        assert payload.size == self.codec.nbytes(n) <= 4 * (0.01 * n + 8 * 100 + 40) + 32
        used = sent_bytes(self.codec, payload, n)
        assert not payload[used:].any()
        assert payload[used - 4 : used].any()
        whole = self.decoded(payload, n)
        payload[used:] = 0xA5
        np.testing.assert_array_equal(self.decoded(payload, n), whole)
        payload[24:32] = 0xFF
        assert self.codec.count_used(payload, n) == payload.size


class TestRandomAll(CompressorContract):
    codec = RandomSparsification(1)


def test_what_there_is_no_room_for_counts_as_not_drawn() -> None:
    """As little room as no chance would leave: the first values are kept, and nothing else is written."""

    class Narrow(RandomSparsification):
        def nbytes(self, n: int, weight: int = 1) -> int:
            return 32 + 8 * 3

    values, codec = gaussian(1000), Narrow(0.5)
    decoded, full = np.empty(1000, np.float32), np.empty(1000, np.float32)
    codec.decode(encoded(codec, values), decoded, weight=1)
    wide = RandomSparsification(0.5)
    wide.decode(encoded(wide, values), full, weight=1)
    (there,) = np.nonzero(decoded)
    np.testing.assert_array_equal(there, np.nonzero(full)[0][:6])


def test_alignments_are_whole_chunks_and_whole_groups() -> None:
    assert [TopK().alignment, RandomSparsification().alignment] == [1600, 512]
