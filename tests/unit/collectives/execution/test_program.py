"""Chunks and pieces cover the vector, in order, aligned and balanced, at any length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.execution.program import partition, pieces

LENGTHS = st.one_of(st.integers(0, 500), st.integers(0, 2**40))
ALIGNMENTS = st.one_of(st.sampled_from([1, 64, 4096]), st.integers(1, 1000))


@given(n=LENGTHS, n_chunks=st.integers(1, 300), alignment=ALIGNMENTS)
def test_partition(n: int, n_chunks: int, alignment: int) -> None:
    chunks = partition(n, n_chunks, alignment)
    assert len(chunks) == n_chunks
    assert (chunks[0].start, chunks[-1].stop) == (0, n)
    assert all(before.stop == after.start for before, after in pairwise(chunks))
    full = [chunk for chunk in chunks if chunk]
    assert all(chunk.start % alignment == 0 for chunk in full)
    blocks = [-(-len(chunk) // alignment) for chunk in chunks]
    assert max(blocks) - min(blocks) <= 1


@given(
    first=st.integers(0, 1000),
    length=st.integers(0, 100_000),
    piece_elements=st.integers(1, 20_000),
    alignment=st.sampled_from([1, 7, 64, 512]),
)
def test_pieces(first: int, length: int, piece_elements: int, alignment: int) -> None:
    chunk = range(first * alignment, first * alignment + length)
    parts = pieces(chunk, piece_elements, alignment)
    assert [part for part in parts if not part] == []
    assert sum(map(len, parts)) == length
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert all(part.start % alignment == 0 for part in parts)
    longest = max(alignment, piece_elements // alignment * alignment)
    assert all(len(part) <= longest for part in parts)
    # Not one piece more than the longest allowed needs, and none longer than another by more than one alignment.
    assert len(parts) == -(-length // longest)
    blocks = [-(-len(part) // alignment) for part in parts]
    assert not blocks or max(blocks) - min(blocks) <= 1
    if parts:
        assert (parts[0].start, parts[-1].stop) == (chunk.start, chunk.stop)


def test_pieces_of_an_empty_chunk() -> None:
    assert pieces(range(64, 64), 10, 64) == ()


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        *((partition, arguments) for arguments in ((-1, 1, 1), (1, 0, 1), (1, 1, 0))),
        *((pieces, arguments) for arguments in ((range(1, 9), 4, 2), (range(8), 0, 2), (range(8), 4, 0))),
    ],
)
def test_nonsense_is_refused(cut: Callable[..., object], arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="cannot cut"):
        cut(*arguments)
