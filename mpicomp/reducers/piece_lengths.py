"""Lengths of the pieces into which codes are cut."""

from __future__ import annotations

from mpicomp.codecs.base import Codec

LONG_PIECE = 1 << 19  # elements that fit into the caches while they are encoded and summed
SHORT_PIECE = 1 << 18  # below this length messages and calls of a piece take longer than its codec
LEAST_PIECES = 32  # fewest pieces of a long vector, so that some travel while others are encoded
BRIEF_ELEMENTS = 1 << 14  # up to here encoding takes less time than accounting for pieces


def piece_elements(codec: Codec, n: int, piece_bytes: int, back: Codec | None = None) -> int:
    """Return the longest piece, a multiple of the alignment. The transport limits its bytes, the caches its elements.

    With a codec for each of two passes, neither pass sends more bytes at once, unless a single alignment has more.
    """
    units = -(-n // codec.alignment)
    unit_bytes = max(1, *(one.nbytes(codec.alignment) for one in (codec, back or codec)))
    suitable = min(LONG_PIECE, max(SHORT_PIECE, n // LEAST_PIECES))
    most = min(piece_bytes // unit_bytes, suitable // codec.alignment, units)
    return codec.alignment * max(1, most)
