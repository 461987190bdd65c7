"""EF-signSGD's pass on the GPU: the CPU's vector, signs and sums, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.feedback.scale_groups import ScaleGroups
from tests.unit.kernels.gpu.side_by_side import FLOATS, SideBySide, assert_same, numbers, words

TENSORS = [5, 1000, 64, 70, 4000, 1, 999]
N = sum(-(-m // 64) * 64 for m in TENSORS)


@pytest.fixture
def both(to_device: Any, to_host: Any) -> SideBySide:
    """Give what calls EF-signSGD's kernels on both devices."""
    return SideBySide("ef_sign", to_device, to_host)


def encode(both: SideBySide, dtype: Any, groups: ScaleGroups, n: int, cut: range, host: bool = True) -> list[Any]:
    """One piece; tables are in host memory or on the device."""
    scales = np.abs(numbers(groups.starts.size, dtype, 2))
    tables = groups.starts, groups.stops, groups.firsts, (cut.start, cut.stop), *groups.span(cut), False
    after, bits, sums = np.full(n, 7, dtype), words(len(cut)) * np.uint64(0), np.full(groups.blocks, 7.0)
    given = numbers(n, dtype), numbers(n, dtype, 1), scales, *tables, after, bits, sums
    return both("compensate_and_pack", *given, host=(2, 3, 4, 5) if host else (), offset=n % 4)


@FLOATS
def test_one_stretch_is_the_cpus(both: SideBySide, dtype: Any) -> None:
    for n in (0, 1, 64, 65, 1000, 4097):
        encode(both, dtype, ScaleGroups.of(None, n), n, range(n), host=n % 2 == 0)


@FLOATS
@pytest.mark.parametrize("bucket", [None, 700, 4097])
def test_stretches_and_pieces_are_the_cpus(both: SideBySide, dtype: Any, bucket: int | None) -> None:
    """Words that two stretches share, stretches that begin within blocks, and padding."""
    groups = ScaleGroups.of(TENSORS, N, bucket)
    for cut in (range(N), range(4096, N)):
        encode(both, dtype, groups, N, cut, host=bucket is None)


def test_sums_show_what_is_not_finite(both: SideBySide) -> None:
    n, groups = 4096 + 70, ScaleGroups.of(None, 4096 + 70)
    for bad in (np.inf, np.nan):
        for place in (4095, 4096 + 65):
            g = numbers(n, np.float32)
            g[place] = bad
            given = g, numbers(n, np.float32, 1), np.array([0.5], np.float32), groups.starts, groups.stops
            end = groups.firsts, (0, n), 0, 1, False, np.zeros_like(g), words(n) * np.uint64(0), np.zeros(2)
            sums = both("compensate_and_pack", *given, *end, host=(2, 3, 4, 5))[-1]
            assert np.flatnonzero(~np.isfinite(sums)).tolist() == [place // 4096]


def test_the_vector_is_written_in_the_place_of_the_gradient(both: SideBySide, to_device: Any, to_host: Any) -> None:
    groups = ScaleGroups.of(TENSORS, N, 4097)
    ours = encode(both, np.float32, groups, N, range(N))
    theirs = [to_device(a) if isinstance(a, np.ndarray) else a for a in ours]
    theirs[10] = theirs[0]
    theirs[12].zero_()
    both.gpu.compensate_and_pack(*theirs)
    inside = np.concatenate([np.arange(a, b) for a, b in zip(groups.starts, groups.stops, strict=True)])
    assert_same(to_host(theirs[0])[inside], ours[10][inside], "after")
    assert_same(to_host(theirs[12]), ours[12], "sums")
