"""Random bits of codecs that compute by NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpicomp.codecs import Draw
from mpicomp.kernels.streams import GROUP, Stream

DRAW = Draw(Stream(7, 0, "code"), step=3, rank=1)


def test_a_piece_draws_the_words_that_the_whole_vector_has_there() -> None:
    whole = DRAW.words(5 * GROUP + 9)
    piece = replace(DRAW, offset=2 * GROUP).words(GROUP + 1)
    np.testing.assert_array_equal(piece, whole[2 * GROUP : 3 * GROUP + 1])
    assert whole.dtype == np.uint32
    assert DRAW.words(0).size == 0


def test_words_are_uniform_and_those_of_another_step_rank_or_seed_are_others() -> None:
    words = DRAW.words(1 << 16)
    assert abs(words.mean() / 2**32 - 0.5) < 0.005  # four standard errors
    assert np.abs(np.unpackbits(words.view(np.uint8)).reshape(-1, 8).mean(0) - 0.5).max() < 0.005
    for other in (replace(DRAW, step=4), replace(DRAW, rank=2), replace(DRAW, stream=Stream(8, 0, "code"))):
        assert (other.words(1 << 16) == words).sum() < 3
