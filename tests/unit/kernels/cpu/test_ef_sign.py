"""EF-signSGD's pass: the reference's vector, signs and sums, and inputs that are left alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.arrays.elements import aligned_empty
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.kernels.cpu.ef_sign import compensate_and_pack, settle
from tests.contracts import guarded
from tests.reference.signs import magnitude_from, magnitudes, pack_bits

LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000, 4095, 4096, 4097, 3 * 4096 + 65, 100_003)
Vector = NDArray[Any]


def values(n: int, dtype: Any, seed: int) -> Vector:
    """Normal values; some zeros of both signs, and at every fifth place -0, whatever the seed."""
    x = np.random.default_rng((n, seed)).standard_normal(n).astype(dtype)
    x[seed::5], x[seed + 1 :: 5], x[4::5] = 0.0, -0.0, -0.0
    return x


def encode(
    g: Vector,
    before: Vector,
    scales: Vector,
    where: ScaleGroups,
    cut: range,
    streaming: bool,
    after: Vector,
    sums: Vector,
) -> NDArray[np.uint64]:
    """One piece; returns its bits."""
    bits = np.full(-(-len(cut) // 64), 99, np.uint64)
    table = where.starts, where.stops, where.firsts, (cut.start, cut.stop), *where.stretches_in(cut)
    compensate_and_pack(g, before, scales, *table, streaming, after, bits, sums)
    return bits


@pytest.mark.parametrize("scale", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_pass_is_the_reference_s_steps(dtype: Any, scale: float) -> None:
    for n in LENGTHS:
        g, before, s = values(n, dtype, 0), values(n, dtype, 1), dtype(scale)
        given = g.copy(), before.copy()
        residual = before - np.where(before >= 0, s, -s)
        want, where = g + residual, ScaleGroups.of(None, n)
        for streaming in (False, True):
            sums = np.full(-(-n // 4096), np.nan)
            with guarded(n, dtype) as after:
                bits = encode(g, before, np.array([s]), where, range(n), streaming, after, sums)
            np.testing.assert_array_equal(after, want)
            np.testing.assert_array_equal(bits, pack_bits(want >= 0))
            np.testing.assert_array_equal(sums, magnitudes(want))
        np.testing.assert_array_equal(g, given[0])
        np.testing.assert_array_equal(before, given[1])
        settle(before, np.array([s]), where.starts, where.stops)
        np.testing.assert_array_equal(before, residual)


@pytest.mark.parametrize("bucket", [1, 7, 64, 100, 4096, 5000, 9 * 4096 + 5, None])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_buckets_of_any_length_have_scales_of_their_own_whatever_the_pieces(dtype: Any, bucket: int | None) -> None:
    segments = (65, 5 * 4096 + 3, 1, 40_000)
    n = sum(-(-length // 64) * 64 for length in segments[:-1]) + segments[-1]
    where = ScaleGroups.of(segments, n, bucket)
    g, before = values(n, dtype, 0), values(n, dtype, 1)
    scales = np.random.default_rng(0).random(where.starts.size).astype(dtype)
    scale, real = np.zeros(n, dtype), np.zeros(n, bool)
    for start, stop, s in zip(where.starts, where.stops, scales, strict=True):
        assert stop - start <= (bucket or n)
        scale[start:stop], real[start:stop] = s, True
    assert real.sum() == sum(segments)
    residual = before - np.where(before >= 0, scale, -scale)
    want = np.where(real, g + residual, 77)
    expected = [
        magnitude_from(want[start:stop], int(start))
        for begin, end in zip(where.starts, where.stops, strict=True)
        for start, stop in blocks(int(begin), int(end))
    ]
    for piece, streaming in ((4096, False), (3 * 4096, True), (n, False), (n, True)):
        after, sums = aligned_empty(n, dtype), np.full(where.blocks, np.nan)
        after[:] = 77
        for start in range(0, n, piece):
            cut = range(start, min(n, start + piece))
            bits = encode(g, before, scales, where, cut, streaming, after, sums)
            signs = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(cut)].astype(bool)
            part = slice(cut.start, cut.stop)
            np.testing.assert_array_equal(signs[real[part]], (want >= 0)[part][real[part]])
        np.testing.assert_array_equal(after, want)
        np.testing.assert_array_equal(sums, expected)
    settle(before, scales, where.starts, where.stops)
    np.testing.assert_array_equal(before[real], residual[real])


def blocks(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut where a multiple of 4096 lies between."""
    cuts = [start, *range(start - start % 4096 + 4096, stop, 4096), stop]
    return list(pairwise(cuts))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sums_show_what_is_not_finite(bad: float) -> None:
    for n, position in ((40, 5), (5000, 4998), (5000, 100), (5000, 4096)):
        g, after = values(n, np.float32, 0), np.empty(n, np.float32)
        g[position] = bad
        sums = np.zeros(-(-n // 4096))
        scales = np.ones(1, np.float32)
        encode(g, values(n, np.float32, 1), scales, ScaleGroups.of(None, n), range(n), False, after, sums)
        assert np.flatnonzero(~np.isfinite(sums)).tolist() == [position // 4096]
