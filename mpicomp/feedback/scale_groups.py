"""Parts of a vector with scales of their own, cut along the pieces that travel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.streams import BLOCK


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of elements in one piece and one group, and its blocks' places among the sums."""

    elements: slice
    group: int
    sums: slice

    def words(self, first: int = 0) -> slice:
        """Return its place in packed bits that begin with those of element `first`, a multiple of 64."""
        return slice((self.elements.start - first) // 64, -(-(self.elements.stop - first) // 64))


def padded_lengths(tensor_lengths: Sequence[int] | None, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the elements of each tensor, and the multiple of 64 that it takes up; the last may end with the vector.

    Raises
    ------
    ValueError
        A tensor is empty, or they do not fill `n` elements.
    """
    real = np.array(tensor_lengths if tensor_lengths is not None and n else [n], np.int64)
    if n and (real <= 0).any():
        raise ValueError(f"tensors of {real.tolist()} elements: each must have at least 1; leave out empty tensors")
    padded = -(-real // 64) * 64
    padded[-1:] = np.minimum(padded[-1:], np.maximum(real[-1:], n - padded[:-1].sum()))
    if padded.sum() != n:
        raise ValueError(
            f"tensors of {real.tolist()} elements, padded to multiples of 64, fill {padded.sum()} elements, not {n}"
        )
    return real, padded


def why(finite: bool) -> float:
    """Return the number that replaces a rank's sums of which one is not finite, so that the reason needs no message.

    NaN where the vector itself holds NaN or infinity, and infinity where finite numbers overflowed. Only ranks whose
    sums are NaN are to be blamed.
    """
    return math.inf if finite else math.nan


@dataclass(frozen=True, slots=True)
class ScaleGroups:
    """Parts of a vector that have a number of their own each, in order, with padding between them.

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
        """Number of elements of each part."""
        return self.stops - self.starts

    def stretches_in(self, cut: range) -> tuple[int, int]:
        """Return the first stretch with elements in `cut`, and the one behind the last."""
        return int(self.stops.searchsorted(cut.start, "right")), int(self.starts.searchsorted(cut.stop))

    def _block(self, group: int, element: int) -> int:
        """Return the place among the sums of an element's block."""
        return int(self.firsts[group]) + element // BLOCK - int(self.starts[group]) // BLOCK

    def runs(self, cuts: Sequence[range]) -> list[list[Run]]:
        """Return the stretches' parts in each piece: whole blocks, or the rest of a block that a stretch begins in."""
        return [list(self._runs_of(cut)) for cut in cuts]

    def _runs_of(self, cut: range) -> Iterator[Run]:
        for group in range(*self.stretches_in(cut)):
            start, stop = max(int(self.starts[group]), cut.start), min(int(self.stops[group]), cut.stop)
            while start < stop:
                end = stop if start % BLOCK == 0 else min(stop, start - start % BLOCK + BLOCK)
                block = self._block(group, start)
                yield Run(slice(start, end), group, slice(block, block + -(-(end - start) // BLOCK)))
                start = end
