"""Shared selection on the GPU: the CPU's labels, distances, payloads and signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.cpu import shared_selection as on_cpu
from mpicomp.kernels.streams import Stream, bernoulli_table, source

SCHEDULE = Stream(3, 1, "selection").schedule()
STEP = np.uint64(7)
# number of ranks, and the m at which something is drawn
DRAWS = {1: (), 2: (2,), 3: (3, 2), 5: (5, 4, 2), 6: (6, 3, 2), 7: (7, 6, 3, 2), 8: (8, 4, 2)}


def labels_of(to_device: Any, ranks: int, groups: int, first_group: int = 0) -> tuple[Any, Any]:
    """Labels by the CPU and by the device."""
    from mpicomp.kernels.gpu import shared_selection

    tables = [bernoulli_table(1, m - 1) for m in DRAWS[ranks] if m % 2]
    sources = np.array([source(0, s) for s in range(len(DRAWS[ranks]))], np.uint64)
    of_odd = (
        np.array([t for t, _ in tables], np.uint8).reshape(-1, 64),
        np.array([rest for _, rest in tables], np.uint64).reshape(-1, 16),
    )
    expected = np.empty((ranks - 1).bit_length() * 8 * groups, np.uint64)
    found = to_device(np.full_like(expected, 5))
    arguments = SCHEDULE, np.uint64(first_group), STEP, sources, *of_odd, ranks
    on_cpu.draw_labels(*arguments, np.empty(40 * 64, np.uint64), expected)
    shared_selection.draw_labels(*arguments, None, found)
    return expected, found


@pytest.mark.parametrize("ranks", DRAWS)
def test_labels_are_the_cpus(to_device: Any, to_host: Any, ranks: int) -> None:
    for groups, first_group in ((0, 0), (1, 0), (70, 2**30 - 30)):
        expected, found = labels_of(to_device, ranks, groups, first_group)
        np.testing.assert_array_equal(to_host(found).view(np.uint64), expected)


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_distances_are_the_cpus(to_device: Any, to_host: Any, ranks: int) -> None:
    from mpicomp.kernels.gpu import shared_selection

    for groups, first_group in ((0, 0), (1, 0), (300, 2**32 - 100)):
        expected = np.empty(groups, np.int64)
        found = to_device(expected)
        arguments = SCHEDULE, np.uint64(first_group), STEP, source(0, 3), ranks
        on_cpu.draw_distances(*arguments, expected)
        shared_selection.draw_distances(*arguments, found)
        np.testing.assert_array_equal(to_host(found), expected)


@pytest.mark.parametrize("votes", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_rows_are_selected_and_scattered_as_on_the_cpu(to_device: Any, to_host: Any, ranks: int, votes: int) -> None:
    from mpicomp.kernels.gpu import shared_selection

    rng = np.random.default_rng(ranks)
    for n in (1, 8 * ranks - 1, 40 * ranks + 3, 47 * ranks + 1):
        size = -(-n // ranks)
        groups = -(-size // 8)
        labels, labels_there = labels_of(to_device, ranks, groups)
        planes = (ranks - 1).bit_length()
        distances = None
        if votes == 2:
            distances = rng.integers(1, max(ranks, 2), groups)
            if ranks <= 2:
                planes, labels, labels_there = 0, labels[:0], labels_there[:0]
        if votes > ranks:
            distances = np.zeros(groups, np.int64)
        distances_there = None if distances is None else to_device(distances)
        words = rng.integers(0, 2**64, (ranks, n), np.uint64)
        payloads, stride = np.empty(ranks * (votes * size + 1), np.uint64), votes * size + 1
        for rank in range(ranks):
            payload = payloads[stride * rank : stride * (rank + 1) - 1]
            found = to_device(payload)
            on_cpu.select_rows(
                words[rank], labels, planes, distances, rank, ranks, np.empty(16 * ranks + 8, np.uint64), payload
            )
            shared_selection.select_rows(
                to_device(words[rank]), labels_there, planes, distances_there, rank, ranks, None, found
            )
            np.testing.assert_array_equal(to_host(found).view(np.uint64), payload)
        expected = [np.empty(n, np.uint64) if vote < votes else None for vote in range(2)]
        placed = [None if array is None else to_device(array) for array in expected]
        scratch = np.empty(24 * ranks, np.uint64)
        on_cpu.scatter_rows(payloads, stride, labels, planes, distances, ranks, scratch, *expected)
        shared_selection.scatter_rows(
            to_device(payloads), stride, labels_there, planes, distances_there, ranks, None, *placed
        )
        for tensor, array in zip(placed, expected, strict=True):
            if array is not None:
                np.testing.assert_array_equal(to_host(tensor).view(np.uint64), array)
