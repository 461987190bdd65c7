"""FullPrecision: the codec contract, and that nothing is lost: what is no number has to be seen by all who get it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mpicomp.codecs.full_precision import FullPrecision
from tests.contracts import GUARD, CodecContract, encoded, gaussian, guarded

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
            codec.encode(gaussian(130, wide), spoiled, draw=None)  # type: ignore[arg-type]
        assert (spoiled == GUARD).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_bytes_of_16_bits_are_numbers_or_none(dtype: str) -> None:
    """All 65536, and nothing beside the vector is written."""
    every = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(every.view(np.int16)).view(getattr(torch, dtype)).float().numpy()
    with guarded(every.size, np.float32) as values:
        FullPrecision(dtype).decode(every.view(np.uint8), values, weight=1)
    np.testing.assert_array_equal(values, expected)
