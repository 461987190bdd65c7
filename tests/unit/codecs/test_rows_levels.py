"""Rows in few levels: the bytes and values of the definition, sizes, errors of long rows, and names of codecs."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import product
from typing import Any

import numpy as np
import pytest

from mpicomp.codecs import ROW_CODECS, FullRows, LevelRows, RowQuantizer, TopRows, row_codec
from mpicomp.codecs.level_buckets import MAGNITUDES
from tests.contracts import draw_at, gaussian, guarded
from tests.reference.rows import encoded_in_levels

COLUMNS = (1, 5, 63, 64, 65, 100, 128, 129, 1000)
every_count = pytest.mark.parametrize("levels", MAGNITUDES)


def some_rows(columns: int, seed: int = 0) -> Any:
    """Normal rows of several sizes, one of zeros, one with a constant, one with zeros amid."""
    values = gaussian(6 * columns, seed=seed).reshape(6, columns)
    values *= np.array([1, 1e-3, 1e4, 0, 1, 1e-7], np.float32)[:, np.newaxis]
    values[4] = -0.3
    values[0, ::3] = -0.0
    return values


@every_count
@pytest.mark.parametrize("bucket", [64, 128, 65536])
def test_bytes_and_values_are_those_of_the_definition(levels: int, bucket: int) -> None:
    codec = LevelRows(levels, bucket)
    for columns, at in product(COLUMNS, (0, 1)):  # a payload may begin anywhere
        values = some_rows(columns)
        want, meant = encoded_in_levels(codec, values)
        with guarded(want.size, np.uint8, at) as payload, guarded(values.size, np.float32, at) as flat:
            codec.encode(values, payload)
            np.testing.assert_array_equal(payload, want)
            codec.decode(payload, flat.reshape(values.shape))
            np.testing.assert_array_equal(flat.reshape(values.shape), meant)


@every_count
def test_deltas_are_those_of_the_definition(levels: int) -> None:
    codec = LevelRows(levels, 64)
    for columns in COLUMNS:
        values, message = some_rows(columns), some_rows(columns, 1)
        want, meant = encoded_in_levels(codec, values - message)
        payload, found = np.empty_like(want), message.copy()
        codec.encode_delta(values, found, payload)
        np.testing.assert_array_equal(payload, want)
        np.testing.assert_array_equal(found, message + meant)


def test_sizes_are_the_formulas() -> None:
    assert LevelRows(4, 128).nbytes(3, 1024) == 3 * 1024 // 4 + 3 * 8 * 2
    assert LevelRows(16, 64).nbytes(3, 100) == 3 * 2 * (32 + 2)  # 36 codes take a word of each plane, as 64 do
    assert LevelRows(3, 64).nbytes(3, 100) == 3 * (13 + 8) + 1 + 3 * 2 * 2
    assert LevelRows(256).nbytes(3, 100) == 3 * (100 + 2)


def test_an_outlier_costs_its_bucket_and_not_its_row() -> None:
    values = gaussian(10 * 1024).reshape(10, 1024)
    values[:, 7] = 100
    errors = {}
    for codec in (LevelRows(16), RowQuantizer(4)):
        payload, found = np.empty(codec.nbytes(10, 1024), np.uint8), np.empty_like(values)
        codec.encode(values, payload)
        codec.decode(payload, found)
        errors[type(codec)] = np.linalg.norm(found[:, 128:] - values[:, 128:]) / np.linalg.norm(values[:, 128:])
    assert errors[LevelRows] < 0.1
    assert errors[RowQuantizer] > 1


@every_count
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e18, 1e38, 3.4e38])
def test_extremes_of_float32_decode_to_finite_values_or_are_refused(levels: int, magnitude: float) -> None:
    codec, values = LevelRows(levels), np.full((2, 70), magnitude, np.float32)
    payload = np.zeros(codec.nbytes(2, 70), np.uint8)
    with suppress(OverflowError) if magnitude > 1e18 else nullcontext():
        codec.encode(values, payload)
    codec.decode(payload, values)
    assert np.isfinite(values).all()


@pytest.mark.parametrize("levels", [2, 3, 4, 8, 16])
def test_a_row_whose_sums_overflow_is_named(levels: int) -> None:
    codec, values = LevelRows(levels), np.ones((3, 70), np.float32)
    values[1] = 3.4e38
    with pytest.raises(OverflowError, match="row 1 is so large that its sums overflow float32: scale the values down"):
        codec.encode(values, np.empty(codec.nbytes(3, 70), np.uint8))


def test_a_difference_that_overflows_leaves_the_message_as_it_was() -> None:
    codec, values = LevelRows(), np.full((1, 64), 3e38, np.float32)
    message, payload = -values, np.empty(codec.nbytes(1, 64), np.uint8)
    with pytest.raises((OverflowError, ValueError), match="row 0"):
        codec.encode_delta(values, message, payload)
    assert (message == -values).all()


def test_the_row_that_is_not_finite_is_named() -> None:
    codec, values = LevelRows(bucket=64), gaussian(600).reshape(3, 200)
    values[2, 199] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity, first in row 2: the activations diverged"):
        codec.encode(values, np.empty(codec.nbytes(3, 200), np.uint8))


def test_names_stand_for_codecs_of_rows() -> None:
    assert row_codec("levels:levels=16,bucket=64") == LevelRows(16, 64)
    assert row_codec("levels") == LevelRows()
    assert row_codec("quantize:bits=2,rounding=stochastic") == RowQuantizer(2, "stochastic")
    assert row_codec("full:dtype=float16") == FullRows("float16")
    assert row_codec("top:fraction=0.1") == TopRows(0.1)
    assert {type(row_codec(name)) for name in ROW_CODECS} == {FullRows, RowQuantizer, LevelRows, TopRows}
    codec = LevelRows()
    assert row_codec(codec) is codec
    assert repr(LevelRows(np.int64(8), np.int64(64))) == "LevelRows(levels=8, bucket=64)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("level", "there is no row codec 'level': choose one of full, quantize, levels, top"),
        ("levels:levels=5", "row codec 'levels:levels=5': levels must be 2 or 3 or 4 or 8 or 16 or 256, not 5"),
        ("levels:bucket=100", "row codec 'levels:bucket=100': bucket must be a multiple of 64 up to 65536, not 100"),
        ("levels:4", "row codec 'levels:4': write options as name=value, not '4'"),
        ("levels:coding=entropy", "row codec 'levels:coding=entropy': .*unexpected keyword argument 'coding'"),
    ],
)
def test_names_and_options_that_do_not_exist_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        row_codec(name)
    assert "\n" not in str(found.value)


def test_nothing_is_drawn() -> None:
    codec, values = LevelRows(3), gaussian(300).reshape(3, 100)
    first, second = np.empty((2, codec.nbytes(3, 100)), np.uint8)
    codec.encode(values, first, draw_at(1), np.arange(3))
    codec.encode(values, second, draw_at(2), np.arange(3) + 7)
    np.testing.assert_array_equal(first, second)
