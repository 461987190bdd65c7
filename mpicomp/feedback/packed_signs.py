"""Results that are one bit per element and two numbers per tensor, left packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.annotations import AnyArray, Array
from mpicomp import kernels
from mpicomp.feedback.scale_groups import ScaleGroups, padded_lengths

CUT_ELEMENTS = 1 << 18  # decoded between two looks at other calls


class PackedSigns(NamedTuple):
    """Result of a step: `positive` of its tensor where an element's bit is 1, else `negative`.

    Attributes
    ----------
    bits : uint64[ceil(n / 64)]
    positive, negative : unsigned integers[tensors]
        Bits of numbers in the result's type.
    """

    bits: Array
    positive: AnyArray
    negative: AnyArray


class SignUnpacker:
    """Decoder of packed signs of a vector.

    Parameters
    ----------
    tensor_lengths : sequence of int or None
        As those of the feedback that left the signs packed.
    n : int

    Attributes
    ----------
    tensors : int
    """

    def __init__(self, tensor_lengths: Sequence[int] | None, n: int) -> None:
        padded = padded_lengths(tensor_lengths, n)[1].tolist()
        self.tensors = len(padded)
        cuts = [range(start, min(start + CUT_ELEMENTS, n)) for start in range(0, n, CUT_ELEMENTS)]
        self._runs = ScaleGroups.of(padded, n).runs(cuts)

    def write(self, signs: PackedSigns, out: AnyArray, streaming: bool) -> Iterator[bool]:
        """Write the result to `out`, unsigned integers[n]; steps of a call. streaming: past the caches."""
        unpack, (bits, positive, negative) = kernels.of("cpu").sign.unpack, signs
        for runs in self._runs:
            for run in runs:
                scales = positive[run.group], negative[run.group]
                unpack(bits[run.words()], *scales, streaming, out[run.elements])
            yield True
