"""Parts of a vector of whole chunks, of each of which a few elements are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mpicomp.codecs.top_k import count_kept, index_bits

PART_ELEMENTS = 1 << 18  # of one piece of work, at most where blocks allow it


@dataclass(frozen=True, slots=True)
class Part:
    """A run of whole chunks, and the places of its kept elements among those of all runs.

    Attributes
    ----------
    start, stop : int
        Elements.
    chunk, keep : int
        `keep` of every `chunk` elements are kept.
    first, last : int
        Places among the values.
    """

    start: int
    stop: int
    chunk: int
    keep: int
    first: int
    last: int

    @property
    def elements(self) -> slice:
        """Its elements in the vector."""
        return slice(self.start, self.stop)

    @property
    def values(self) -> slice:
        """Its places among the kept values."""
        return slice(self.first, self.last)

    @property
    def bits(self) -> int:
        """Bits of a place within a chunk."""
        return index_bits(self.chunk)


def lay_out(lengths: Sequence[int], rates: Sequence[int], chunk: int | None, exact: bool = False) -> tuple[Part, ...]:
    """Cut a vector's tensors into parts.

    Parameters
    ----------
    lengths : sequence of int
        Elements of each tensor; the tensors follow each other.
    rates : sequence of int
        The rate of each tensor.
    chunk : int, optional
        None: each tensor's chunks are as long as its rate.
    exact : bool
        A tensor is one chunk of any length.
    """
    parts: list[Part] = []
    start = first = 0
    for length, rate in zip(lengths, rates, strict=True):
        size = max(1, length) if exact else chunk or rate
        keep = max(1, -(-length // rate)) if exact else size // rate
        step = size * max(1, PART_ELEMENTS // size)
        cuts = [*range(start, start + length, step), start + length]
        for begin, end in pairwise(cuts):
            last = first + count_kept(end - begin, size, keep)
            parts.append(Part(begin, end, size, keep, first, last))
            first = last
        start += length
    return tuple(parts)


def join_runs(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Join parts of one kind that follow each other without a short chunk: a device takes each run in one launch."""
    runs: list[Part] = []
    for part in parts:
        before = runs[-1] if runs else None
        if (
            before is not None
            and (before.chunk, before.keep) == (part.chunk, part.keep)
            and (before.stop - before.start) % part.chunk == 0
        ):
            runs[-1] = replace(before, stop=part.stop, last=part.last)
        else:
            runs.append(part)
    return tuple(runs)
