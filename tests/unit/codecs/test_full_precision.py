"""FullPrecision and Rounded: the codec contract, bits of every number, and the nearest of 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mpicomp.codecs.full_precision import FullPrecision, Rounded
from tests.contracts import GUARD, CodecContract, encoded, gaussian, guarded
from tests.reference.one_process.allreduce import rounded as nearest

DTYPES = ("float32", "float64", "float16", "bfloat16")


class TestUncompressed(CodecContract):
    codec = FullPrecision("float32")

    def check_round_trip(self, values: NDArray[Any], decoded: NDArray[Any]) -> None:
        np.testing.assert_array_equal(decoded, values)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_are_refused(self, bad: float) -> None:
        """Not here: methods look at every result, and say so on all ranks."""
        for position in (0, 70, 99):
            values = gaussian(100)
            values[position] = bad
            np.testing.assert_array_equal(self.decoded(encoded(self.codec, values), 100), values)

    def _decodes_or_refuses(self, payload: NDArray[np.uint8], n: int) -> None:
        """Damage comes out as it is, and is written inside the vector alone."""
        with guarded(n, np.float32) as values:
            self.codec.decode(payload, values, weight=1)
        assert values.tobytes() == payload.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_a_vectors_type_come_back_to_the_bit(dtype: str) -> None:
    codec, wide = FullPrecision(dtype), np.float64 if dtype == "float64" else np.float32
    values = gaussian(1000, wide)
    values[:3] = 0.0, -0.0, 1e5
    rounded = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float64).numpy()
    payload = encoded(codec, values)
    assert payload.size == codec.nbytes(1000) == 1000 * getattr(torch, dtype).itemsize
    found = np.full(1000, 77, wide)
    codec.decode(payload, found, weight=3)
    np.testing.assert_array_equal(found, rounded)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(rounded))


@pytest.mark.parametrize("dtype", DTYPES)
def test_payloads_cut_off_or_too_long_are_refused_and_write_nothing(dtype: str) -> None:
    codec = FullPrecision(dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    payload = encoded(codec, gaussian(130, wide))
    for wrong in (payload[:-1], payload[:-8], payload[:0], np.append(payload, np.zeros(8, np.uint8))):
        found = np.full(130, 77, wide)
        with pytest.raises(ValueError, match="damaged"):
            codec.decode(wrong, found, weight=1)
        assert (found == 77).all()
        spoiled = np.full(wrong.size, GUARD, np.uint8)
        with pytest.raises(ValueError, match="damaged"):
            codec.encode(gaussian(130, wide), spoiled, draw=None)
        assert (spoiled == GUARD).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_bytes_of_16_bits_are_numbers_or_none(dtype: str) -> None:
    """Check all 65536 numbers, and that only the vector is written."""
    every = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(every.view(np.int16)).view(getattr(torch, dtype)).float().numpy()
    with guarded(every.size, np.float32) as values:
        FullPrecision(dtype).decode(every.view(np.uint8), values, weight=1)
    np.testing.assert_array_equal(values, expected)


ROUNDED = Rounded("float16"), Rounded("bfloat16")
every_codec = pytest.mark.parametrize("codec", ROUNDED, ids=str)


class RoundedContract(CodecContract):
    codec: Rounded
    dtypes = (np.float32, np.float64)

    def check_round_trip(self, values: NDArray[Any], decoded: NDArray[Any]) -> None:
        want = nearest(values.astype(np.float32), self.codec.dtype)
        np.testing.assert_array_equal(decoded, want.astype(values.dtype))

    @pytest.mark.parametrize("magnitude", [1e39, 1e160, 1.7e308])
    def test_float64_values_beyond_float32_decode_to_finite_values(self, magnitude: float) -> None:
        """Not here: they have no code."""
        with np.errstate(over="ignore"), pytest.raises(OverflowError, match=r"too large for b?float16"):
            encoded(self.codec, np.full(100, magnitude))

    def test_adding_is_decoding_and_adding(self) -> None:
        for n in (0, 1, 65, 1000):
            payload = encoded(self.codec, gaussian(n))
            for dtype in self.dtypes:
                sums, decoded = gaussian(n, dtype, seed=3), self.decoded(payload, n, dtype)
                expected = sums + decoded
                self.codec.add(payload, sums)
                np.testing.assert_array_equal(sums, expected)
        with pytest.raises(ValueError, match="damaged"):
            self.codec.add(encoded(self.codec, gaussian(1000))[:-8], np.zeros(1000, np.float32))

    def _decodes_or_refuses(self, payload: NDArray[np.uint8], n: int) -> None:
        """Damage comes out as it is, and is written inside the vector alone; reducers look at every result."""
        with guarded(n, np.float32) as values:
            self.codec.decode(payload, values, weight=1)
        want = torch.from_numpy(payload.view(np.int16)).view(getattr(torch, self.codec.dtype)).float().numpy()
        np.testing.assert_array_equal(values, want)


class TestFloat16(RoundedContract):
    codec = ROUNDED[0]

    def test_zeros_and_extremes_decode_to_finite_values(self) -> None:
        for value in (0.0, -0.0, 1e-45, -1e-45, 65519.0, -65519.0):
            values = np.full(100, value, np.float32)
            assert np.isfinite(self.decoded(encoded(self.codec, values), 100)).all()
        for value in (65520.0, -3e38):
            with pytest.raises(OverflowError, match="too large for float16"):
                encoded(self.codec, np.array([1, value], np.float32))


class TestBFloat16(RoundedContract):
    codec = ROUNDED[1]


@every_codec
def test_numbers_of_every_magnitude_and_all_that_lie_half_way_are_rounded_to_the_nearest_even(codec: Rounded) -> None:
    dtype = getattr(torch, codec.dtype)
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).double().numpy()
    every = every[np.isfinite(every)]
    half_way = ((every[:-1] + every[1:]) / 2).astype(np.float32)
    beside = (np.nextafter(half_way, np.float32(to)) for to in (0, np.inf))
    values = np.concatenate([every.astype(np.float32), half_way, *beside])
    values = np.concatenate([values, -values])
    found = np.empty_like(values)
    codec.decode(encoded(codec, values), found, weight=1)
    want = torch.from_numpy(values).to(dtype).float().numpy()
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(want))


@every_codec
def test_a_rounding_does_not_depend_on_flushing_of_denormal_numbers(codec: Rounded) -> None:
    """Which torch.set_flush_denormal switches for the thread: small float16 numbers are no denormal float32 ones."""
    values = gaussian(1000) * np.float32(2.0**-20)
    want, found = encoded(codec, values), np.empty_like(values)
    codec.decode(want, found, weight=1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        np.testing.assert_array_equal(encoded(codec, values), want)
        again = np.empty_like(values)
        codec.decode(want, again, weight=1)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(again, found)
