"""Parts of a vector with scales of their own, cut along the pieces that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.sign import BLOCK


@dataclass(frozen=True, slots=True)
class Run:
    """Elements start .. stop in one piece and one segment; their words, and their blocks' places among the sums."""

    start: int
    stop: int
    segment: int
    words: range
    sums: range


def cut_runs(cuts: Sequence[range], lengths: NDArray[np.int64], n: int) -> tuple[list[list[Run]], NDArray[np.int64]]:
    """The runs of each piece, and where each segment's sums begin.

    Blocks of 4096 elements are counted from the start of the vector and end where a segment ends, so sums over them do
    not depend on how the vector is cut into pieces.

    Raises
    ------
    ValueError
        A segment but the last is not a positive multiple of 64 elements, or they do not add up to `n`.
    """
    if lengths.sum() != n or (n and (lengths <= 0).any()) or (lengths[:-1] % 64).any():
        raise ValueError(
            f"segments must be positive multiples of 64 elements (but for the last) that add up to {n}, "
            f"not {lengths.tolist()}"
        )
    ends = np.cumsum(lengths).tolist()
    runs: list[list[Run]] = []
    firsts = [0] * len(ends)
    segment, block = 0, 0
    for cut in cuts:
        of_piece: list[Run] = []
        start = cut.start
        while start < cut.stop:
            while start >= ends[segment]:
                segment += 1
                firsts[segment] = block
            stop = min(cut.stop, ends[segment])
            if start % BLOCK:
                stop = min(stop, start - start % BLOCK + BLOCK)
            count = -(-(stop - start) // BLOCK)
            words = range(start // 64, -(-stop // 64))
            of_piece.append(Run(start, stop, segment, words, range(block, block + count)))
            block += count
            start = stop
        runs.append(of_piece)
    return runs, np.array(firsts, np.int64)
