"""Random words on the GPU: the CPU's, and merging with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.cpu import philox as on_cpu
from mpicomp.kernels.streams import Stream, bernoulli_table, source

SCHEDULE = Stream(3, 1, "merge").schedule()
WEIGHTS = ((1, 1), (1, 2), (3, 2), (1, 6))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("first_group", [0, 2**25 - 30, 2**30 - 30, 2**40 + 7])
def test_words_are_the_cpus(to_device: Any, to_host: Any, weights: tuple[int, int], first_group: int) -> None:
    from mpicomp.kernels.gpu import philox

    table, rest = bernoulli_table(*weights)
    for groups, step, ordinal in ((0, 0, 0), (1, 1, 0), (70, 2**32 - 1, 2**12 - 1)):
        numbers = np.uint64(first_group), np.uint64(step), source(2**20 - 1, ordinal)
        expected = np.empty(8 * groups, np.uint64)
        on_cpu.draw_words(SCHEDULE, *numbers, table, rest, np.empty(24 * 64, np.uint64), expected)
        found = to_device(np.zeros_like(expected))
        philox.draw_words(SCHEDULE, *numbers, table, rest, None, found)
        np.testing.assert_array_equal(to_host(found).view(np.uint64), expected)


@pytest.mark.parametrize("n_words", [0, 1, 7, 8, 1000, 4097])
def test_merged_words_are_the_cpus(to_device: Any, to_host: Any, n_words: int) -> None:
    from mpicomp.kernels.gpu import philox

    drawn, incoming, held = np.random.default_rng(n_words).integers(0, 2**64, (3, n_words), np.uint64)
    found = to_device(held)
    philox.merge_words(to_device(drawn), to_device(incoming, 0), found)
    on_cpu.merge_words(drawn, incoming, held)
    np.testing.assert_array_equal(to_host(found).view(np.uint64), held)
