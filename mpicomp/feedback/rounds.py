"""Rounds of a step: feedback works on pieces, and a reducer moves them. Neither calls the other in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collectives.annotations import FloatArray, Testable
from collectives.execution.program import Message

Work = Callable[[int], Testable | None]
"""Work on a piece. Returns a handle that completes once a device has done it; None: it is done."""


class Round(NamedTuple):
    """One exchange between the ranks, as feedback works on its pieces.

    Attributes
    ----------
    encode : callable
        ``encode(piece)`` makes this rank's payload of a piece.
    decode : callable
        ``decode(piece)`` uses a complete piece.
    merge : callable or None
        ``merge(message, buffer)`` adds a payload that has landed to that of its piece; None: the reducer merges
        payloads by itself, or none.
    complete : callable or None
        ``complete(piece)`` replaces a piece that has the contributions of all ranks, before it is sent back to them.
    numbers : callable or None
        ``numbers()`` returns two arrays: values, and the memory for their mean over ranks in full precision.
    pieces : (int, int) or None
        Numbers of pieces to encode and to decode; None: those of the reducer's program.
    meanwhile : sequence of (str, callable, sequence)
        Phase, work and its shares, which are done while the numbers travel.

    Examples
    --------
    >>> from mpicomp.feedback.rounds import Round
    >>> encoded, decoded = [], []
    >>> one = Round(encoded.append, decoded.append)
    >>> one.encode(0)
    >>> encoded, one.merge
    ([0], None)
    """

    encode: Work
    decode: Work
    merge: Callable[[Message, int], Testable | None] | None = None
    complete: Callable[[int], None] | None = None
    numbers: Callable[[], tuple[FloatArray, FloatArray]] | None = None
    pieces: tuple[int, int] | None = None
    meanwhile: Sequence[tuple[str, Callable[[Any], Testable | None], Sequence[Any]]] = ()

    def with_decode(self, decode: Work) -> Round:
        """Return the round with another `decode`, in a third of the time of `_replace`."""
        return Round(self.encode, decode, self.merge, self.complete, self.numbers, self.pieces, self.meanwhile)
