"""Signs to bits and back without a residual, votes to values: the reference's bits, by both kinds of stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.arrays.elements import widen
from mpicomp.aggregator.nonfinite import all_finite_result
from mpicomp.kernels.cpu.shared_selection import unpack_pair
from mpicomp.kernels.cpu.sign import all_finite, pack, unpack
from tests.contracts import guarded
from tests.reference import signs as reference

LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097, 3 * 4096 + 65, 100_003)
FLOATS = (np.float32, np.float64)
WIDTHS = (np.uint16, np.uint32, np.uint64)


def values(n: int, dtype: Any, offset: int = 1) -> NDArray[Any]:
    """Normal values from `offset` elements off any alignment on; some zeros of both signs."""
    x = np.empty(n + offset, dtype)[offset:]
    x[:] = np.random.default_rng(n).standard_normal(n)
    x[::5], x[1::5] = 0.0, -0.0
    return x


def packed(x: NDArray[Any], odd_positive: bool = False) -> tuple[NDArray[np.uint64], bool]:
    bits, kind = np.full(-(-x.size // 64), 77, np.uint64), x.dtype.type
    return bits, pack(x, bits, odd_positive, kind(0), np.nextafter(kind(0), kind(1)))


def unpacked(votes: list[NDArray[np.uint64]], n: int, width: Any, streaming: bool, offset: int = 0) -> NDArray[Any]:
    """What is made of the votes in guarded memory, `offset` elements behind a multiple of 32 bytes."""
    with guarded(n, width, offset) as out:
        if len(votes) == 1:
            unpack(*votes, width(40_000), width(3), streaming, out)
        else:
            unpack_pair(*votes, width(40_000), width(0), width(3), streaming, out)
    return out


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_equal_the_reference(dtype: Any) -> None:
    for n in LENGTHS:
        for odd_positive in (False, True):
            for offset in (0, 1, 3):
                x = values(n, dtype, offset)
                bits, finite = packed(x, odd_positive)
                np.testing.assert_array_equal(bits, reference.pack_bits(reference.signs(x, odd_positive)))
                assert finite


@pytest.mark.parametrize("n", [5, 64, 133, 4 * 64 + 21])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_found_in_every_position(dtype: Any, n: int) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for position in range(n):
            x = values(n, dtype)
            assert all_finite(x)
            x[position] = bad
            assert not packed(x)[1]
            assert not all_finite(x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_of_both_signs_do_not_cancel(dtype: Any) -> None:
    for n in (20, 4 * 64):
        x = values(n, dtype)
        x[0], x[16] = np.inf, -np.inf
        assert not packed(x)[1]
        assert not all_finite(x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_are_finite(dtype: Any) -> None:
    for n in (20, 300):
        x = np.full(n, np.finfo(dtype).max)
        assert packed(x)[1]
        assert all_finite(x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_of_16_bit_results_all_that_are_no_numbers_are_found(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = np.empty(every.size, np.float32)
    widen(every if dtype == "bfloat16" else every.view(dtype), dtype, wide)
    finite = every[np.isfinite(wide)]
    assert all_finite_result(finite, dtype)
    for bits in every[~np.isfinite(wide)]:
        finite[77] = bits
        assert not all_finite_result(finite, dtype), hex(bits)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_unpacking_writes_the_votes_mean_and_nothing_else(width: Any, count: int) -> None:
    for n in LENGTHS:
        votes = list(np.random.default_rng(n).integers(0, 2**64, (count, -(-n // 64)), np.uint64))
        positive = [reference.unpack_bits(bits, n) for bits in votes]
        want = np.where(np.all(positive, axis=0), 40_000, np.where(np.any(positive, axis=0), 0, 3))
        for offset in (0, 1, 3):
            np.testing.assert_array_equal(unpacked(votes, n, width, False, offset), want)
        np.testing.assert_array_equal(unpacked(votes, n, width, True), want)
