"""RandomSparsification: the codec contract, kept values, and damage."""

from __future__ import annotations

import numpy as np

from mpicomp.codecs.base import sent_bytes
from mpicomp.codecs.random_sparsification import RandomSparsification
from tests.contracts import CompressorContract, draw_at, encoded, gaussian
from tests.reference import compressors
from tests.reference.statistics import assert_binomial


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
    """The first values are kept, and nothing is written behind them."""

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


def test_alignment_is_a_whole_group() -> None:
    assert RandomSparsification().alignment == 512
