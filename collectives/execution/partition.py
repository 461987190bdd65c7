"""Cutting a vector: elements into the aligned chunks of a plan, and a chunk into the pieces that flow one by one."""

from __future__ import annotations

from itertools import pairwise


def partition(n: int, n_chunks: int, alignment: int) -> tuple[range, ...]:
    """Cut ``n`` elements into ``n_chunks`` neighbouring chunks.

    Chunks start at multiples of ``alignment`` and their lengths, in units of ``alignment``, differ by one at most, so
    some are empty where ``n`` is small. Only the last that is not empty may end off a multiple. The result depends on
    the arguments alone: every rank computes the same cut.

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    if n < 0 or n_chunks < 1 or alignment < 1:
        raise ValueError(
            f"cannot cut {n} elements into {n_chunks} chunks aligned to {alignment}: "
            "give n >= 0, n_chunks >= 1 and alignment >= 1"
        )
    n_blocks = -(-n // alignment)
    bounds = (min(n, alignment * (n_blocks * chunk // n_chunks)) for chunk in range(n_chunks + 1))
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def pieces(chunk: range, piece_elements: int, alignment: int) -> tuple[range, ...]:
    """Cut one chunk into the fewest, equally long pieces that do not exceed ``piece_elements``; none is empty.

    Pieces start at multiples of ``alignment``, and the longest wanted is rounded down to one, but never to 0.

    Raises
    ------
    ValueError
        The chunk does not start at a multiple of ``alignment``, or an argument is out of range.
    """
    if piece_elements < 1 or alignment < 1 or chunk.start % alignment:
        raise ValueError(
            f"cannot cut {chunk} into pieces of {piece_elements} elements aligned to {alignment}: "
            "give positive lengths and a chunk that starts at a multiple of the alignment"
        )
    if not chunk:
        return ()
    n_blocks = -(-len(chunk) // alignment)
    piece_blocks = max(1, piece_elements // alignment)
    return tuple(
        range(chunk.start + part.start, chunk.start + part.stop)
        for part in partition(len(chunk), -(-n_blocks // piece_blocks), alignment)
    )
