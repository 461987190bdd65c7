"""Lengths of the pieces that codes are made of."""

from __future__ import annotations

from mpicomp.codecs.base import Codec

LONG_PIECE = 1 << 19  # elements of which encoding and summing take place in the caches
SHORT_PIECE = 1 << 18  # below, each piece's messages and calls take longer than its codec
LEAST_PIECES = 32  # that travel while others are encoded, where they need not be shorter than `SHORT_PIECE`
BRIEF_ELEMENTS = 1 << 14  # up to here encoding takes less time than accounting for pieces


def piece_elements(codec: Codec, n: int, piece_bytes: int, back: Codec | None = None) -> int:
    """Return the longest piece: in bytes as suits the transport, in elements as suits the caches; whole alignments.

    Of two passes with a codec each, neither sends more bytes at once, unless one alignment is more.
    """
    units = -(-n // codec.alignment)
    unit_bytes = max(1, *(one.nbytes(codec.alignment) for one in (codec, back or codec)))
    suitable = min(LONG_PIECE, max(SHORT_PIECE, n // LEAST_PIECES))
    most = min(piece_bytes // unit_bytes, suitable // codec.alignment, units)
    return codec.alignment * max(1, most)
