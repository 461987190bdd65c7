"""Counts in bit planes on the GPU: the sums and values of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.codecs.vote_counts import planes_of
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.kernels.cpu.planes import powers_of_two
from tests.unit.kernels.gpu.side_by_side import FLOATS, SideBySide, numbers

WORDS = (0, 1, 4, 5, 1023, 1025)


@pytest.fixture
def both(to_device: Any, to_host: Any) -> SideBySide:
    """Give what calls the kernels of vote counts on both devices."""
    return SideBySide("vote_counts", to_device, to_host)


def planes(count: int, words: int, seed: int = 0) -> Any:
    return np.random.default_rng([count, words, seed]).integers(0, 2**64, count * words, np.uint64)


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (1, 2), (3, 1), (1, 7), (4, 4), (12, 300), (300, 12)])
def test_sums_are_the_cpus(both: SideBySide, weights: tuple[int, int]) -> None:
    """Whatever the bits: what goes beyond is lost."""
    a, b, of_sum = planes_of(weights[0]), planes_of(weights[1]), planes_of(sum(weights))
    for words in WORDS:
        both("add_counts", planes(a, words), a, planes(of_sum, words, 1), b, of_sum, words)


def values(both: SideBySide, dtype: Any, weight: int, groups: ScaleGroups, cut: range, host: bool) -> None:
    """One piece's values."""
    count, words = planes_of(weight), -(-len(cut) // 64)
    few = count <= 6 and weight < 64
    kind = np.int8 if few else dtype
    factors = numbers(groups.starts.size, dtype, weight)
    both(
        "few_values" if few else "many_values", planes(count, words), count, words,
        powers_of_two(count + 1, kind)[1:], kind(-weight), factors, groups.starts, groups.stops, cut.start,
        *groups.span(cut), False, np.full(len(cut), 7, dtype), host=(3, 5, 6, 7) if host else (3,),
    )  # fmt: skip


@FLOATS
def test_values_are_the_cpus(both: SideBySide, dtype: Any) -> None:
    for n in (0, 1, 65, 1025):
        for weight in (1, 7, 63, 64, 2**26 - 1):
            values(both, dtype, weight, ScaleGroups.of(None, n), range(n), host=n % 2 == 0)


@FLOATS
def test_each_stretch_has_its_factor_and_padding_is_zero(both: SideBySide, dtype: Any) -> None:
    lengths = [5, 1500, 64, 70, 3000, 1, 1, 999]
    n = sum(-(-m // 64) * 64 for m in lengths)
    for bucket in (None, 500):
        groups = ScaleGroups.of(lengths, n, bucket)
        for cut, weight in ((range(n), 7), (range(4096), 300), (range(4096, n), 7)):
            values(both, dtype, weight, groups, cut, host=bucket is None)
