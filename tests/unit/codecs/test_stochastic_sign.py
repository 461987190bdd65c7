"""StochasticSign: the codec contract, its norm, and an unbiased result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs import StochasticSign
from mpicomp.codecs.stochastic_sign import norm
from tests.contracts import CodecContract, draw_at, encoded, gaussian
from tests.reference.statistics import assert_binomial

STEPS = 2000


class TestStochasticSign(CodecContract):
    codec = StochasticSign()

    def check_round_trip(self, values: NDArray[Any], decoded: NDArray[Any]) -> None:
        np.testing.assert_array_equal(np.abs(decoded), np.full(values.size, norm(values)))

    def test_eight_bytes_of_norm_and_one_bit_per_element(self) -> None:
        assert [self.codec.nbytes(n) for n in (0, 1, 64, 65)] == [8, 16, 16, 24]
        payload = encoded(self.codec, gaussian(65))
        assert payload[:4].view("<f4")[0] == norm(gaussian(65))
        assert not payload[4:8].any()

    def test_all_zero_values_decode_to_exactly_zero(self) -> None:
        assert not self.decoded(encoded(self.codec, np.zeros(100, np.float32)), 100).any()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_damaged_norm_counts_as_zero(self, bad: float) -> None:
        payload = encoded(self.codec, gaussian(100))
        payload[:4].view(np.float32)[0] = bad
        assert not self.decoded(payload, 100).any()

    def test_decoded_mean_is_the_value(self) -> None:
        values = np.array([0.75, -0.5, 0.25, 0.0, -0.125, 0.3], np.float32)
        scale = float(norm(values))
        ups = sum(self.decoded(encoded(self.codec, values, draw_at(step)), 6) > 0 for step in range(STEPS))
        for i, value in enumerate(values):
            assert_binomial(ups[i], STEPS, 0.5 + value / (2 * scale), f"element {i}")

    def test_a_single_value_keeps_its_sign(self) -> None:
        for value in (3.0, -3.0):
            assert self.decoded(encoded(self.codec, np.full(1, value, np.float32)), 1) == value

    def test_ranks_steps_and_chunks_draw_differently(self) -> None:
        zeros_with_norm = np.zeros(1 << 16, np.float32)
        zeros_with_norm[0] = 1
        first = self.decoded(encoded(self.codec, zeros_with_norm, draw_at()), zeros_with_norm.size)
        for other in (draw_at(4), draw_at(rank=2), draw_at(ordinal=1), draw_at(offset=1 << 16), draw_at(seed=12)):
            second = self.decoded(encoded(self.codec, zeros_with_norm, other), zeros_with_norm.size)
            assert_binomial((first == second)[1:].sum(), first.size - 1, 0.5, "equal bits")


class TestNorm:
    @pytest.mark.parametrize("n", [0, 1, 15, 17, 4096, 10_000])
    def test_matches_float64(self, n: int) -> None:
        values = gaussian(n)
        assert norm(values) == pytest.approx(np.linalg.norm(values.astype(np.float64)), rel=1e-7)

    def test_is_rounded_to_float32_once(self) -> None:
        values = np.full(4096 * 5, 0.1, np.float32)
        assert norm(values) == np.float32(np.sqrt(values.size * np.float64(np.float32(0.1)) ** 2))

    def test_does_not_overflow(self) -> None:
        largest = np.finfo(np.float32).max
        assert norm(np.full(3, largest, np.float32)) == largest
