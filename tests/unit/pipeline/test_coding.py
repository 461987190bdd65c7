"""Rows of an example as they travel, options of `Deltas`, and random words of a pipeline by itself."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from mpicomp.codecs import LevelRows, RowQuantizer
from mpicomp.codecs.base import Draw
from mpicomp.kernels.streams import Stream
from mpicomp.pipeline import Deltas, Direct
from mpicomp.pipeline.coding import CodingPlace, coded_matrix, row_keys


@pytest.mark.parametrize(
    ("row_shape", "rows", "columns"),
    [
        ((6,), 1, 6),
        ((64, 16), 64, 16),  # tokens
        ((4, 8), 4, 8),
        ((16, 8, 8), 16, 64),  # images
        ((16, 64, 64), 16 * 64, 64),
        ((16, 4, 4), 1, 256),
        ((512, 1, 1), 1, 512),
        ((3, 5, 7), 3, 35),
        ((2, 3, 2, 2), 1, 24),
        ((8, 128, 32), 8 * 128, 32),
        ((), 1, 1),
    ],
)
def test_rows_are_the_last_dimension_or_as_many_of_an_images_as_make_them_long(
    row_shape: tuple[int, ...], rows: int, columns: int
) -> None:
    assert coded_matrix(row_shape) == (rows, columns)


@pytest.mark.parametrize(
    ("rounding", "bits", "warned"), [("stochastic", 2, True), ("stochastic", 3, False), ("nearest", 2, False)]
)
def test_differences_whose_rounding_is_beyond_the_theorys_bound_are_warned_of(
    rounding: Any, bits: int, warned: bool
) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Deltas(RowQuantizer(bits, rounding), 8)
        Direct(RowQuantizer(bits, rounding))
    assert [one.filename for one in found] == [__file__] * warned
    assert not warned or "errs by 0.84 of a difference's norm" in str(found[0].message)


def test_codecs_are_given_by_name_too() -> None:
    assert Direct("levels:levels=16") == Direct(LevelRows(16))
    named = Deltas("levels:levels=8,bucket=64", 8, stored="quantize:bits=8")
    assert named == Deltas(LevelRows(8, 64), 8, stored=RowQuantizer(8))
    with pytest.raises(ValueError, match="levels must be 2 or 3 or 4 or 8 or 16 or 256, not 7"):
        Deltas("levels:levels=7", 8)
    with pytest.raises(ValueError, match="there is no row codec 'signs'"):
        Deltas("levels", 8, stored="signs")
    with pytest.raises(TypeError, match=r"TopRows\(.* sends no differences"):
        Deltas("top", 8)


def test_a_pipeline_by_itself_draws_the_words_that_it_always_did() -> None:
    codec, ids = RowQuantizer(4, "stochastic"), np.array([5, 2])
    rows = np.random.default_rng(1).normal(size=(2, 3, 40)).astype(np.float32)
    coding = Direct(codec).start(CodingPlace(2, "before", seed=7))
    payload, expected = (np.zeros(coding.nbytes(ids, (3, 40)), np.uint8) for _ in range(2))
    coding.encode(rows, ids, payload)
    draw = Draw(Stream(7, 2, "direct rows"), 0, 0)
    codec.encode(rows.reshape(6, 40), expected, draw, row_keys(ids, (3, 40)))
    assert np.array_equal(payload, expected)
    for other in (CodingPlace(2, seed=7, pipeline=1), CodingPlace(2, seed=7, part=1)):
        Direct(codec).start(other).encode(rows, ids, payload)
        assert not np.array_equal(payload, expected)
