"""Parts of a vector with scales of their own, cut along the pieces that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.streams import BLOCK


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of elements in one piece and one tensor; its words, and its blocks' places among the sums."""

    elements: slice
    tensor: int
    words: slice
    sums: slice


def padded_lengths(tensor_lengths: Sequence[int] | None, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Elements of each tensor, and what it takes up: a multiple of 64; the last may end with the vector.

    Raises
    ------
    ValueError
        A tensor is empty, or they do not fill `n` elements.
    """
    real = np.array(tensor_lengths if tensor_lengths is not None and n else [n], np.int64)
    padded = -(-real // 64) * 64
    padded[-1:] = np.minimum(padded[-1:], np.maximum(real[-1:], n - padded[:-1].sum()))
    if padded.sum() != n or (n and (real <= 0).any()):
        raise ValueError(
            f"tensors of {real.tolist()} elements, padded to multiples of 64, fill {padded.sum()} elements, not {n}"
        )
    return real, padded


def cut_runs(cuts: Sequence[range], lengths: NDArray[np.int64]) -> tuple[list[list[Run]], NDArray[np.int64]]:
    """The runs of each piece, and where each tensor's sums begin.

    Blocks of 4096 elements are counted from the start of the vector and end where a tensor ends, so sums over them do
    not depend on how the vector is cut into pieces.
    """
    ends = np.cumsum(lengths).tolist()
    runs: list[list[Run]] = []
    firsts = [0] * len(ends)
    tensor, block = 0, 0
    for cut in cuts:
        of_piece: list[Run] = []
        start = cut.start
        while start < cut.stop:
            while start >= ends[tensor]:
                tensor += 1
                firsts[tensor] = block
            stop = min(cut.stop, ends[tensor])
            if start % BLOCK:
                stop = min(stop, start - start % BLOCK + BLOCK)
            count = -(-(stop - start) // BLOCK)
            words = slice(start // 64, -(-stop // 64))
            of_piece.append(Run(slice(start, stop), tensor, words, slice(block, block + count)))
            block += count
            start = stop
        runs.append(of_piece)
    return runs, np.array(firsts, np.int64)


@dataclass(frozen=True, slots=True)
class ScaleGroups:
    """Parts of a vector that have a number of their own each, in order; what lies between them is padding.

    Sums over a stretch are made of blocks: 4096 elements counted from the start of the vector, cut where a stretch
    begins or ends. So they do not depend on how the vector is cut into pieces.

    Attributes
    ----------
    starts, stops : int64[stretches]
        Elements.
    firsts : int64[stretches]
        Where each one's blocks begin among all.
    blocks : int
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    firsts: NDArray[np.int64]
    blocks: int

    @classmethod
    def of(cls, tensor_lengths: Sequence[int] | None, n: int, bucket: int | None = None) -> ScaleGroups:
        """Tensors, or buckets counted from the start of each.

        Raises
        ------
        ValueError
            See `padded_lengths`.
        """
        real, padded = padded_lengths(tensor_lengths, n)
        starts = np.cumsum(padded) - padded
        stops = starts + real
        if bucket is not None:
            bucket = min(bucket, max(n, 1))  # so that places stay within 64 bits
            counts = -(-real // bucket)
            number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = np.repeat(starts, counts) + number * bucket
            stops = np.minimum(starts + bucket, np.repeat(stops, counts))
        of_each = (stops - 1) // BLOCK - starts // BLOCK + 1
        return cls(starts, stops, np.cumsum(of_each) - of_each, int(of_each.sum()))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Elements of each."""
        return self.stops - self.starts

    def span(self, cut: range) -> tuple[int, int]:
        """First stretch with elements in `cut`, and the one behind the last."""
        return int(self.stops.searchsorted(cut.start, "right")), int(self.starts.searchsorted(cut.stop))
