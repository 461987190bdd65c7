"""SSDM's passes on the GPU: the CPU's sums, momentum and signs, from the same random words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.streams import Stream, source
from tests.unit.kernels.gpu.side_by_side import FLOATS, SideBySide, assert_same, numbers

SHIFT = np.uint64(0xC0FFEE42 << 32)  # is added to each word of correlated draws

MOMENTUM = pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])


@pytest.fixture
def both(to_device: Any, to_host: Any) -> SideBySide:
    """Give what calls SSDM's kernels on both devices."""
    return SideBySide("ssdm", to_device, to_host)


@FLOATS
def test_norms_are_the_cpus(both: SideBySide, dtype: Any) -> None:
    for n in (0, 1, 9, 65, 4095, 4097, 18 * 4096 + 77):
        both("norm", numbers(n, dtype), np.full(1, 7, np.float32), offset=n % 4)
    most = np.finfo(dtype).max
    for values in ([most, most], [1e38, 3e38, 2e38], [1, np.inf], [np.nan, 1]):
        both("norm", np.array(values, dtype), np.full(1, 7, np.float32))


@pytest.mark.parametrize("norm", [0.0, 2.5, 300.0, float(np.float32(1e-45)), np.inf, np.nan])
def test_signs_are_the_same_by_a_norm_on_the_device(norm: float, both: SideBySide, to_device: Any) -> None:
    begin = Stream(3, 1, "signs").schedule(), np.uint64(64), np.uint64(17), source(5, 2) | SHIFT
    g = numbers(1100, np.float32)
    found = []
    for one in (np.float64(norm), to_device(np.full(1, norm, np.float32))):
        words = to_device(np.zeros(18, np.uint64))
        with np.errstate(all="ignore"):
            both.gpu.stochastic_signs(*begin, to_device(g), None, None, g[0], g[0], one, words)
        found.append(words)
    assert bool((found[0] == found[1]).all())


@FLOATS
@MOMENTUM
@pytest.mark.parametrize("first", [0, 2**41 + 64])
def test_momentum_and_signs_are_the_cpus(both: SideBySide, dtype: Any, momentum: bool, first: int) -> None:
    begin = Stream(3, 1, "signs").schedule(), np.uint64(first), np.uint64(17), source(5, 2)
    for n in (0, 1, 9, 64, 65, 1000, 4097):
        g, held = numbers(n, dtype), numbers(n, dtype, 1)
        norm = np.float64(5 * n**0.5) if n != 65 else np.float64(0)
        given = (held, np.full(n, 7, dtype), dtype(0.9), dtype(0.1)) if momentum else (None, g[:0], dtype(0), dtype(0))
        both("stochastic_signs", *begin, g, *given, norm, np.zeros(-(-n // 64), np.uint64), host=(0,), offset=n % 4)


def test_momentum_is_kept_in_its_place(both: SideBySide, to_device: Any, to_host: Any) -> None:
    begin = Stream(3, 1, "signs").schedule(), np.uint64(0), np.uint64(17), source(0)
    g, held, end = (
        numbers(1100, np.float32),
        numbers(1100, np.float32, 1),
        (np.float32(0.9), np.float32(0.1), np.float64(9)),
    )
    bits = np.zeros(18, np.uint64)
    moved = both("stochastic_signs", *begin, g, held, np.zeros_like(g), *end, bits, host=(0,))[6]
    there = to_device(held)
    both.gpu.stochastic_signs(*begin, to_device(g), there, there, *end, to_device(bits))
    np.testing.assert_array_equal(to_host(there), moved)


def test_signs_of_what_is_not_finite_are_the_cpus(both: SideBySide) -> None:
    g = np.tile(np.array([np.nan, np.inf, -np.inf, 1, -1, 0, -0.0], np.float32), 11)
    begin = Stream(3, 1, "signs").schedule(), np.uint64(0), np.uint64(17), source(0)
    for norm in (0.0, 1.0, 5e-324, np.inf, np.nan):
        both(
            "stochastic_signs", *begin, g, None, g[:0], g[0], g[0], np.float64(norm), np.zeros(2, np.uint64), host=(0,)
        )


@pytest.mark.parametrize("momentum", [False, True])
def test_blocks_of_many_tensors_have_the_bits_of_each(to_device: Any, to_host: Any, momentum: bool) -> None:
    """One launch for tensors of 70, 4096 and 100 elements, each of which begins at a multiple of 64."""
    from mpicomp.kernels.cpu import ssdm as on_cpu
    from mpicomp.kernels.gpu import ssdm
    from mpicomp.kernels.gpu.sign import BlockRows

    kind, spans = np.float32, [(0, 70), (128, 128 + 4096), (4288, 4388)]
    n, schedule = spans[-1][1], Stream(3, 1, "signs").schedule()
    g, m = np.random.default_rng(0).standard_normal((2, n)).astype(kind)
    beta, gain = (kind(0.9), kind(0.1)) if momentum else (None, None)
    step, own = np.uint64(5), source(1) | SHIFT
    norms = np.array([30.0, 0.0, 2.5])
    rows = np.array([[start, stop, group, start // 64] for group, (start, stop) in enumerate(spans)])
    blocks = BlockRows(to_device(rows.reshape(-1), 0), 0, 3, False)
    there = to_device(m, 0) if momentum else None
    sums, moved = to_device(np.zeros(3)), to_device(np.zeros_like(m), 0) if momentum else None
    ssdm.squares_of_blocks(to_device(g, 0), there, beta, gain, blocks, sums)
    known = norms > 0
    scales = to_device(np.where(known, 2.0**31 / np.where(known, norms, 1), 0))
    bits = to_device(np.zeros(-(-n // 64), np.uint64))
    terms = to_device(g, 0), there, moved, beta, gain, scales, blocks, bits
    ssdm.stochastic_signs_of_blocks(schedule, step, own, *terms)
    for group, (start, stop) in enumerate(spans):
        part, old = g[start:stop], m[start:stop] if momentum else None
        expected, packed = np.zeros(1), np.zeros(-(-(stop - start) // 64), np.uint64)
        on_cpu.squares(part, old, beta, gain, expected)
        new = np.zeros_like(part) if momentum else None
        on_cpu.stochastic_signs(schedule, np.uint64(start), step, own, part, old, new, beta, gain, norms[group], packed)
        assert_same(to_host(sums)[group : group + 1], expected, group)
        assert_same(to_host(bits).view(np.uint64)[start // 64 : start // 64 + packed.size], packed, group)
        if momentum:
            assert_same(to_host(moved)[start:stop], new, group)
