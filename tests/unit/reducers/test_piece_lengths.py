"""Lengths of the pieces that codes are made of."""

from __future__ import annotations

import pytest

from mpicomp.codecs.quantizer import Quantizer
from mpicomp.codecs.scaled_sign import OneBit
from mpicomp.reducers.piece_lengths import LONG_PIECE, SHORT_PIECE, piece_elements

MUCH = 1 << 30  # bytes


@pytest.mark.parametrize(
    ("n", "longest"),
    [
        (1_000_000, SHORT_PIECE),  # four: fewer would leave little to travel while others are encoded
        (8_000_000, SHORT_PIECE),
        (12_800_000, 400_000 // 512 * 512),
        (25_000_000, LONG_PIECE),
        (1_000_000_000, LONG_PIECE),
        (1000, 1024),
    ],
)
def test_long_vectors_have_longer_pieces(n: int, longest: int) -> None:
    assert piece_elements(OneBit(bucket=512), n, MUCH) == longest


def test_pieces_are_no_longer_than_suits_the_transport_but_one_alignment_at_least() -> None:
    codec = Quantizer(bucket=512, levels=4)
    suitable = piece_elements(codec, 25_000_000, 1 << 16)
    assert 0.95 * (1 << 16) < codec.nbytes(suitable) <= 1 << 16
    assert piece_elements(codec, 25_000_000, 1) == codec.alignment
