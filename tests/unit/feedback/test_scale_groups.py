"""Segments and pieces together cut a vector once, and sums do not feel the pieces."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.execution.program import pieces
from mpicomp.feedback.scale_groups import ScaleGroups, padded_lengths

BLOCK = 4096
# around multiples of words and of blocks
LENGTHS = st.lists(
    st.one_of(st.integers(1, 200), st.integers(4000, 4200), st.integers(1, 20_000)), min_size=1, max_size=6
)


def padded(tensor_lengths: list[int], ragged: bool) -> tuple[int, list[int]]:
    """Elements in all and per segment; ragged: the vector ends with its last segment."""
    lengths = [-(-length // 64) * 64 for length in tensor_lengths]
    if ragged:
        lengths[-1] = tensor_lengths[-1]
    return sum(lengths), lengths


@given(tensor_lengths=LENGTHS, ragged=st.booleans())
def test_each_segment_is_padded_to_words_and_the_last_may_end_with_the_vector(
    tensor_lengths: list[int], ragged: bool
) -> None:
    n, lengths = padded(tensor_lengths, ragged)
    real, filled = padded_lengths(tensor_lengths, n)
    assert real.tolist() == tensor_lengths
    assert filled.tolist() == lengths


def test_without_segments_the_vector_is_one() -> None:
    for n in (0, 1, 64, 100):
        assert [part.tolist() for part in padded_lengths(None, n)] == [[n], [n]]
    assert [part.tolist() for part in padded_lengths([], 0)] == [[0], [0]]


@pytest.mark.parametrize(
    ("tensor_lengths", "n"),
    [([64], 128), ([65, 1], 66), ([65, 1], 128), ([65, 1], 193), ([], 5), ([100], 99)],
)
def test_segments_that_do_not_fill_the_vector_are_refused(tensor_lengths: list[int], n: int) -> None:
    with pytest.raises(ValueError, match=f"fill -?[0-9]+ elements, not {n}"):
        padded_lengths(tensor_lengths, n)


@pytest.mark.parametrize(("tensor_lengths", "n"), [([64, 0, 2, 64], 192), ([64, 0], 64), ([-64, 128], 64)])
def test_empty_tensors_are_refused_in_words_of_their_own(tensor_lengths: list[int], n: int) -> None:
    with pytest.raises(ValueError, match="each must have at least 1; leave out empty tensors"):
        padded_lengths(tensor_lengths, n)


@given(
    tensor_lengths=LENGTHS, ragged=st.booleans(), bucket=st.sampled_from([None, 700, 5000]), blocks=st.integers(1, 4)
)
def test_runs_are_the_groups_blocks_in_order_whatever_the_pieces(
    tensor_lengths: list[int], ragged: bool, bucket: int | None, blocks: int
) -> None:
    n, _ = padded(tensor_lengths, ragged)
    groups = ScaleGroups.of(tensor_lengths, n, bucket)
    expected = [
        (group, start, min(stop, start - start % BLOCK + BLOCK))
        for group, (begin, stop) in enumerate(zip(groups.starts.tolist(), groups.stops.tolist(), strict=True))
        for start in (begin, *range(begin - begin % BLOCK + BLOCK, stop, BLOCK))
    ]
    cuts = pieces(range(n), blocks * BLOCK, BLOCK)
    found, places = [], []
    for cut, of_piece in zip(cuts, groups.runs(cuts), strict=True):
        for run in of_piece:
            start, stop = run.elements.start, run.elements.stop
            assert cut.start <= start < stop <= cut.stop
            assert run.words() == slice(start // 64, -(-stop // 64))
            assert run.words(cut.start) == slice((start - cut.start) // 64, -(-(stop - cut.start) // 64))
            ends = (*range(start - start % BLOCK + BLOCK, stop, BLOCK), stop)
            found += [(run.group, max(start, end - (end % BLOCK or BLOCK)), end) for end in ends]
            places += range(run.sums.start, run.sums.stop)
    assert found == expected
    assert places == list(range(groups.blocks))
    assert groups.firsts.tolist() == [[group for group, _, _ in expected].index(k) for k in range(groups.firsts.size)]


def test_a_bucket_longer_than_any_vector_is_a_whole_segment() -> None:
    found, whole = ScaleGroups.of([100, 200], 328, sys.maxsize), ScaleGroups.of([100, 200], 328)
    np.testing.assert_array_equal(found.stops, whole.stops)
    assert found.blocks == whole.blocks == 2
