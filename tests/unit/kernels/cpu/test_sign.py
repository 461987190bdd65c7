"""Signs to bits and back, with and without a residual: the reference's bits."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.arrays.elements import widen
from mpicomp.feedback.nonfinite import all_finite_result
from mpicomp.kernels.cpu.shared_selection import unpack_pair
from mpicomp.kernels.cpu.sign import (
    add_and_clear,
    all_finite,
    encode,
    pack,
    subtract_result,
    unpack,
)
from tests.contracts import guarded
from tests.reference import signs as reference

DTYPES = (np.float32, np.float64)
MODES = ("plain", "own", "paper")
STEP, LIMIT, PREVIOUS = 0.75, 0.5, 0.3
# a word of each half of the blocks, of the odd block, of the short one, and the end
POSITIONS = (*range(64), 4095, 4096, 8191, 8192, 12287, 12288, 12350, 12352, 12356)
LONG = 3 * 4096 + 64 + 5


class Input(NamedTuple):
    """A vector, its residual and a last result's bits."""

    u: NDArray[Any]
    residual: NDArray[Any]
    bits: NDArray[np.uint64]


def inputs(n: int, dtype: Any, offset: int = 0) -> Input:
    """Normal values from `offset` elements off any alignment on; w is 0 in some places, with both signs of zero."""
    rng = np.random.default_rng(n)
    u, residual = (np.empty(n + offset, dtype)[offset:] for _ in range(2))
    u[:], residual[:] = rng.standard_normal((2, n))
    u[::5], u[1::5], residual[::5], residual[1::5] = 0.0, -0.0, 0.0, -0.0
    return Input(u, residual, rng.integers(0, 2**64, -(-n // 64), np.uint64))


def run(
    mode: str, given: Input, odd_positive: bool = True, whole: NDArray[Any] | None = None, two_buffers: bool = False
) -> reference.Encoded:
    """`encode` on copies that lie as the given arrays do; with `two_buffers` the old residual stays."""
    u, kind = given.u, given.u.dtype.type
    residual = None
    if mode != "plain":
        residual = np.empty(given.residual.size + 3, u.dtype)[3:]
        residual[:] = given.residual
    left = np.full_like(residual, np.nan) if residual is not None and two_buffers else residual
    bits, sums = given.bits.copy(), np.full(-(-u.size // 4096), np.nan)
    step, limit, zero, tiny = kind(STEP), kind(LIMIT), kind(0), np.nextafter(kind(0), kind(1))
    previous = kind(PREVIOUS) if mode == "paper" else None
    clipped = encode(u, whole, residual, left, bits, step, limit, previous, odd_positive, zero, tiny, sums)
    if two_buffers:
        np.testing.assert_array_equal(residual, given.residual)
    return reference.Encoded(bits, left, clipped, sums)


def expected(mode: str, given: Input, odd_positive: bool = True) -> reference.Encoded:
    kind = given.u.dtype.type
    if mode == "plain":
        return reference.encode_plain(given.u, odd_positive)
    if mode == "own":
        return reference.encode_own(given.u, given.residual, kind(STEP), kind(LIMIT))
    return reference.encode_paper(given.u, given.residual, given.bits, kind(PREVIOUS))


def assert_same(got: reference.Encoded, want: reference.Encoded) -> None:
    np.testing.assert_array_equal(got.bits, want.bits)
    np.testing.assert_array_equal(got.sums, want.sums)
    assert got.clipped == want.clipped
    if want.residual is None:
        assert got.residual is None
    else:
        np.testing.assert_array_equal(got.residual, want.residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_encode_equals_the_reference(mode: str, dtype: Any) -> None:
    for n in LENGTHS:
        for offset, odd_positive in ((0, True), (1, False), (3, True)):
            given = inputs(n, dtype, offset)
            before = given.u.copy()
            assert_same(run(mode, given, odd_positive), expected(mode, given, odd_positive))
            np.testing.assert_array_equal(given.u, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["own", "paper"])
def test_a_difference_is_encoded_as_the_vector_that_it_is(mode: str, dtype: Any) -> None:
    for n, padding in product(LENGTHS[1:], (False, True)):
        padded = -(-n // 64) * 64 if padding else n
        given = inputs(padded, dtype)
        whole = np.random.default_rng(n).standard_normal(n).astype(dtype)
        after = given.u[:n]
        vector = np.zeros(padded, dtype)
        np.subtract(whole, after, out=vector[:n])
        assert_same(run(mode, given._replace(u=after), whole=whole), run(mode, given._replace(u=vector)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_result_is_subtracted_as_an_unpacked_one_is(dtype: Any) -> None:
    for n in LENGTHS:
        x, _, bits = inputs(n, dtype)
        expected = x - np.where(reference.unpack_bits(bits, n), dtype(STEP), dtype(-STEP))
        subtract_result(x, bits, dtype(STEP))
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_smallest_numbers_are_not_taken_for_zeros(dtype: Any) -> None:
    n = 64 + 9
    tiny = np.full(n, np.nextafter(dtype(0), dtype(1)))
    for odd_positive in (False, True):
        none = np.zeros(2, np.uint64)
        assert reference.unpack_bits(run("plain", Input(tiny, tiny, none), odd_positive).bits, n).all()
        assert not run("plain", Input(-tiny, tiny, none), odd_positive).bits.any()


@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_whole_blocks_encode_as_the_vector_does(mode: str) -> None:
    n = 5 * 4096 + 100
    given = inputs(n, np.float32)
    whole = run(mode, given)
    for cuts in ((0, 4096, n), (0, 3 * 4096, 5 * 4096, n), (0, 4096, 2 * 4096, 3 * 4096, 4 * 4096, 5 * 4096, n)):
        parts = [
            run(mode, Input(given.u[a:b], given.residual[a:b], given.bits[a // 64 : -(-b // 64)]))
            for a, b in pairwise(cuts)
        ]
        residual = None if mode == "plain" else np.concatenate([part.residual for part in parts])
        joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("bits", "sums")]
        assert_same(reference.Encoded(joined[0], residual, sum(part.clipped for part in parts), joined[1]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["own", "paper"])
def test_the_new_residual_may_have_a_buffer_of_its_own(mode: str, dtype: Any) -> None:
    for n in (0, 1, 63, 64, 65, 4096, LONG):
        given = inputs(n, dtype, 1)
        assert_same(run(mode, given, two_buffers=True), run(mode, given))
        whole = inputs(n + 1, dtype).u[:n]
        padded = given._replace(residual=inputs(-(-n // 64) * 64, dtype).residual)
        assert_same(run(mode, padded, whole=whole, two_buffers=True), run(mode, padded, whole=whole))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rule_paper_taken_lazily_equals_the_eager_rule_over_many_steps(dtype: Any) -> None:
    """Subtracting the last result in the next pass gives the bits that subtracting it at once does."""
    n = 4096 + 77
    rng = np.random.default_rng(8)
    eager, kind = np.zeros(n, dtype), dtype
    lazy, bits, sums = eager.copy(), np.zeros(-(-n // 64), np.uint64), np.empty(2)
    previous = kind(0)
    zero, tiny = kind(0), np.nextafter(kind(0), kind(1))
    for _ in range(30):
        u, step = rng.standard_normal(n).astype(dtype), kind(rng.uniform(0.1, 2))
        encode(u, None, lazy, lazy, bits, step, kind(0), previous, False, zero, tiny, sums)
        w = u + eager
        np.testing.assert_array_equal(bits, reference.pack_bits(reference.signs(w, None)))
        bits[:] = rng.integers(0, 2**64, bits.size, np.uint64)  # stands for the ranks' merged signs
        eager = w - np.where(reference.unpack_bits(bits, n), step, -step)
        previous = step
    subtract_result(lazy, bits, previous)
    np.testing.assert_array_equal(lazy, eager)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", MODES)
def test_sums_show_what_is_not_finite(mode: str, bad: float) -> None:
    for position in POSITIONS:
        given = inputs(LONG, np.float32)
        given.u[position] = bad
        assert np.flatnonzero(~np.isfinite(run(mode, given).sums)).tolist() == [position // 4096]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_full_precision_input_is_the_compensated_vector_and_may_be_written_to_the_vector(mode: str, dtype: Any) -> None:
    for n, in_place in product(LENGTHS, (False, True)):
        given = inputs(n, dtype, 3)
        u, residual = given.u.copy(), given.residual.copy()
        out, sums = u if in_place else np.full(n, np.nan, dtype), np.full(-(-n // 4096), np.nan)
        c, previous = None if mode == "plain" else residual, dtype(PREVIOUS) if mode == "paper" else None
        left = c if c is None or in_place else np.full_like(residual, np.nan)
        add_and_clear(u, c, left, given.bits, previous, out, sums)
        added = {
            "plain": dtype(0),
            "own": given.residual,
            "paper": reference.settle(given.residual, given.bits, dtype(PREVIOUS)),
        }
        np.testing.assert_array_equal(out, given.u + added[mode])
        np.testing.assert_array_equal(residual, np.zeros(n) if mode != "plain" and in_place else given.residual)
        if left is not None:
            np.testing.assert_array_equal(left, np.zeros(n))
        np.testing.assert_array_equal(sums, reference.magnitudes(given.u))
        if mode == "plain":
            sums[:] = np.nan
            add_and_clear(given.u, None, None, given.bits, None, None, sums)
            np.testing.assert_array_equal(sums, reference.magnitudes(given.u))


@pytest.mark.parametrize("dtype", DTYPES)
def test_settling_subtracts_the_last_result(dtype: Any) -> None:
    for n in LENGTHS:
        given = inputs(n, dtype, 1)
        want = reference.settle(given.residual, given.bits, dtype(PREVIOUS))
        subtract_result(given.residual, given.bits, dtype(PREVIOUS))
        np.testing.assert_array_equal(given.residual, want)


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
    """Return the values of the votes in guarded memory, `offset` elements behind a multiple of 32 bytes."""
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
