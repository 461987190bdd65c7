"""Few elements of a vector on the GPU: the CPU's bits, also where payloads are damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.top_k import count_kept as kept_of
from mpicomp.kernels.cpu import sparse as on_cpu
from mpicomp.kernels.streams import Stream, source

FLOATS = (np.float32, np.float64)


def numbers(n: int, dtype: Any, count: int) -> list[Any]:
    """Numbers of all sizes and zeros of both signs, from an odd element of a longer array on."""
    rng = np.random.default_rng(n)
    made = rng.standard_normal((count, n + 1)) * 10.0 ** rng.integers(-20, 20, (count, n + 1))
    return list(np.where(rng.random(made.shape) < 0.1, rng.choice([0.0, -0.0], made.shape), made).astype(dtype)[:, 1:])


def assert_same_bits(found: NDArray[Any], expected: NDArray[Any], what: object = "") -> None:
    assert found.dtype.itemsize == expected.dtype.itemsize
    assert found.tobytes() == expected.tobytes(), what


@pytest.mark.parametrize("shape", [(1, 1), (10, 1), (10, 3), (1000, 7)], ids=str)
def test_places_within_chunks_expand_as_on_the_cpu(to_device: Any, to_host: Any, shape: tuple[int, int]) -> None:
    from mpicomp.kernels.gpu import sparse

    chunk, keep = shape
    rng = np.random.default_rng(1)
    for n in (0, 1, 999, 2345):
        indices = rng.integers(0, chunk, kept_of(n, chunk, keep)).astype(np.uint32)
        indices[::5] = rng.choice([chunk, 2**31, 2**32 - 1], indices[::5].size)  # damaged
        expected = np.empty(indices.size, np.int64)
        on_cpu.expand(indices, chunk, keep, 500, 500 + n, expected)
        found = to_device(np.empty_like(expected))
        sparse.expand(to_device(indices.view(np.int32)), chunk, keep, 500, 500 + n, found)
        assert_same_bits(to_host(found), expected)


@pytest.mark.parametrize("chunk", [1, 3, 100, 5000])
def test_strata_are_the_cpus(to_device: Any, to_host: Any, chunk: int) -> None:
    from mpicomp.kernels.gpu import sparse

    schedule, step = Stream(4, 0, "indices").schedule(), np.uint64(3)
    for first, stop in ((0, 0), (0, 1), (5, 2600 * chunk - chunk // 2), (2**32 * 512 + 777, 40 * chunk)):
        expected = np.empty(-(-stop // chunk), np.int64)
        on_cpu.draw_strata(schedule, first, step, source(7, 2), chunk, 0, stop, expected)
        found = to_device(np.zeros_like(expected))
        sparse.draw_strata(schedule, first, step, source(7, 2), chunk, 0, stop, found)
        assert_same_bits(to_host(found), expected)
    on_cpu.draw_strata(schedule, first, step, source(7, 2), chunk, 900, 900 + stop, expected)
    sparse.draw_strata(schedule, first, step, source(7, 2), chunk, 900, 900 + stop, found)
    assert_same_bits(to_host(found), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_in_a_sum_is_noticed(to_device: Any, dtype: Any) -> None:
    from mpicomp.kernels.gpu import sparse

    for n in (0, 1, 1025):
        ones = np.ones(n, dtype)
        assert sparse.finite_sum(to_device(ones), to_device(ones), None).item()
        for position in {0, n // 2, n - 1} if n else ():
            for bad in (np.nan, np.inf, -np.inf):
                spoiled = ones.copy()
                spoiled[position] = bad
                assert not sparse.finite_sum(to_device(spoiled), to_device(ones), None).item()
                assert not sparse.finite_sum(to_device(ones), to_device(spoiled), None).item()
        if n:
            full = to_device(np.full(n, np.finfo(dtype).max))
            assert not sparse.finite_sum(full, full, None).item()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_that_is_looked_at_may_be_kept_and_then_lacks_places_alone(
    to_device: Any, to_host: Any, dtype: Any
) -> None:
    from mpicomp.kernels.gpu import sparse

    for n in (1, 1025):
        x, residual = np.random.default_rng(n).standard_normal((2, n)).astype(dtype)
        places, found, there = np.arange(0, n, 3) + 300, np.full(n, 7, dtype), to_device(np.full(n, 7, dtype))
        assert on_cpu.finite_sum(x, residual, found)
        assert sparse.finite_sum(to_device(x), to_device(residual), there).item()
        assert_same_bits(to_host(there), found)
        on_cpu.remember(None, residual, None, None, 300, places, None, found)
        sparse.remember(None, to_device(residual), None, None, 300, to_device(places), None, there)
        assert_same_bits(to_host(there), found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("past", [None, 0.7], ids=str)
def test_picked_and_remembered_values_have_the_bits_of_the_cpus(
    to_device: Any, to_host: Any, dtype: Any, past: float | None
) -> None:
    from mpicomp.kernels.gpu import sparse

    scales = (None, None) if past is None else (dtype(past), dtype(1 - past))
    for n, count in ((1, 0), (1, 1), (4097, 1100)):
        x, residual, values, kept, out = numbers(n, dtype, 5)
        places = np.sort(np.random.default_rng(n).choice(n, count, replace=False))
        found = [to_device(array.copy()) for array in (values[:count], kept[:count], out)]
        on_device = to_device(x), to_device(residual)
        given = None if past is None else kept[:count]
        kept_there = None if past is None else found[1]
        on_cpu.pick(x, residual, places, scales[0], values[:count], given)
        sparse.pick(*on_device, to_device(places), scales[0], found[0], kept_there)
        on_cpu.remember(x, residual, *scales, 300, places + 300, given, out)
        sparse.remember(*on_device, *scales, 300, to_device(places + 300), kept_there, found[2])
        for one, other in zip(found, (values[:count], kept[:count], out), strict=True):
            assert_same_bits(to_host(one), other)


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64])
def test_values_are_put_where_they_belong_the_last_of_equal_places_last(
    to_device: Any, to_host: Any, kind: Any
) -> None:
    from mpicomp.kernels.gpu import sparse

    rng = np.random.default_rng(0)
    for places in (
        np.zeros(0, np.int64), np.array([0]), np.sort(rng.choice(3000, 1500, replace=False)),
        rng.integers(0, 200, 1500), rng.permutation(3000)[:1500], np.array([5, 7, 7, 9, 9, 9]),
    ):  # fmt: skip
        expected = np.arange(3000, dtype=kind)
        values, found = np.arange(1, places.size + 1).astype(kind), to_device(expected.copy())
        on_cpu.put(values, places, expected)
        sparse.put(to_device(values), to_device(places), found)
        assert_same_bits(to_host(found), expected)


@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64)])
@pytest.mark.parametrize("shape", [(7, 1), (10, 3), (1000, 40)], ids=str)
def test_chunks_are_spread_as_on_the_cpu_damaged_or_not(
    to_device: Any, to_host: Any, shape: tuple[int, int], dtypes: Any, adding: bool
) -> None:
    from mpicomp.kernels.gpu import sparse

    chunk, keep = shape
    rng = np.random.default_rng(3)
    for n in (0, 1, 2097):
        count = kept_of(n, chunk, keep)
        values, out = numbers(max(count, n), dtypes[0], 1)[0][:count].copy(), numbers(n, dtypes[1], 1)[0]
        within = np.concatenate([
            np.sort(rng.choice(min(chunk, n - start), kept_of(min(chunk, n - start), chunk, keep), replace=False))
            for start in range(0, n, chunk)
        ] or [[]])  # fmt: skip
        wild = np.where(rng.random(count) < 0.3, rng.integers(0, 2**32, count), rng.integers(0, chunk, count))
        for damage in range(3):
            indices = within if damage == 0 else wild if damage == 1 else np.where(np.arange(count) < 50, wild, within)
            expected, found = out.copy(), to_device(out.copy())
            if damage:
                values[::7] = rng.choice([np.nan, np.inf, -np.inf], values[::7].size)
            on_cpu.spread_chunks(values, indices.astype(np.uint32), chunk, keep, expected, adding)
            given = to_device(values), to_device(indices.astype(np.uint32).view(np.int32))
            sparse.spread_chunks(*given, chunk, keep, found, adding)
            assert_same_bits(to_host(found), expected, (n, damage))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_masked_elements_are_compressed_and_spread_as_on_the_cpu(
    to_device: Any, to_host: Any, share: float, dtype: Any
) -> None:
    from mpicomp.kernels.gpu import sparse

    rng = np.random.default_rng(5)
    for n in (0, 1, 64, 65, 4500):
        x = numbers(n, dtype, 1)[0]
        x[::5] = rng.choice([1e38, -1e38, 2e38, -3e38], x[::5].size)  # some quotients are beyond float32
        words = np.packbits(rng.random(64 * (n // 64 + 2)) < share, bitorder="little").view(np.uint64)
        marked, most = round(share * n), float(np.finfo(np.float32).max)
        for room in (marked // 2, n + 5):
            expected = np.full(room, 7, np.float32)
            found = to_device(expected.copy())
            count = on_cpu.compress_masked(x, words, 1 / 3, most, expected)
            told = sparse.compress_masked(to_device(x), to_device(words.view(np.int64)), 1 / 3, most, found)
            assert told.shape == ()
            assert_same_bits(to_host(found), expected)
            expected[: room // 3] = rng.choice([np.nan, np.inf, -0.0, 1.0], room // 3)
            spread = np.full(n, 7, dtype)
            spread_there = to_device(spread.copy())
            on_cpu.spread_masked(words, expected, spread)
            sparse.spread_masked(to_device(words.view(np.int64)), to_device(expected), spread_there)
            assert_same_bits(to_host(spread_there), spread)
            assert told.item() == count  # last: where kernels are only compiled, it is garbage, and fails
