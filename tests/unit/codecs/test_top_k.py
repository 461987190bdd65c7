"""TopK: the codec contract, kept values, and damage."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from mpicomp.codecs.top_k import TopK, count_kept
from tests.contracts import (
    LENGTHS,
    CompressorContract,
    check_several_at_once,
    draw_at,
    encoded,
    gaussian,
    guarded,
)
from tests.reference.sparse import top, within_chunks
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


def test_alignment_is_whole_chunks() -> None:
    assert TopK().alignment == 1600
