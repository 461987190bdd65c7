"""Where Marsit's feedback works: runs of elements that share a global step, and what it works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from mpicomp.feedback.scale_groups import Run, ScaleGroups

Tensors = Sequence[tuple[NDArray[Any], NDArray[Any]]]
"""Pairs of vectors: what was before, and after."""


class Source(Protocol):
    """Who has a vector, or makes it when it is asked for."""

    @property
    def values(self) -> NDArray[Any]:
        """It is looked at, and left alone."""
        ...


class SignPart(NamedTuple):
    """A run of elements that share a scale, and where its bits, sums and residual are; `within` its tensor."""

    elements: slice
    within: slice
    tensor: int
    bits: Any
    second: Any
    sums: Any
    residual: Any


def sign_parts(
    groups: ScaleGroups, pieces: Sequence[range], lengths: Any, votes: tuple[Any, Any], sums: Any, residual: Any
) -> list[list[SignPart]]:
    """The parts of each piece; `lengths` of the tensors without padding, `votes` packed, the second perhaps None."""
    bits, second = votes

    def part(run: Run) -> SignPart:
        own = bits[run.words()], None if second is None else second[run.words()]
        first, length = int(groups.starts[run.group]), int(lengths[run.group])
        within = slice(run.elements.start - first, min(run.elements.stop - first, length))
        kept = None if residual is None else residual[run.elements]
        return SignPart(run.elements, within, run.group, *own, sums[run.sums], kept)

    return [[part(run) for run in of_piece] for of_piece in groups.runs(pieces)]
