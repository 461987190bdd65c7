"""Loops over rows of few bits: bytes and values of the plain NumPy definition, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs import RowQuantizer
from mpicomp.kernels.cpu.rows import mark, spread
from tests.contracts import ROW_QUANTIZERS, draw_at, guarded
from tests.reference import rows as reference

COLUMNS = (1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 513, 1000, 2047, 2048, 2049, 4097)


def some_rows(columns: int, seed: int = 0) -> NDArray[np.float32]:
    """Normal rows of several sizes, one of zeros, one with a constant, one with zeros amid."""
    values = np.random.default_rng((seed, columns)).standard_normal((6, columns)).astype(np.float32)
    values *= np.array([1, 1e-3, 1e4, 0, 1, 1e-7], np.float32)[:, None]
    values[4] = -0.3
    values[0, ::3] = -0.0
    return values


@pytest.mark.parametrize("codec", ROW_QUANTIZERS, ids=str)
def test_bytes_and_values_are_those_of_the_definition(codec: RowQuantizer) -> None:
    keys, draw = np.array([5, 0, 2**40, 7, 1, 3], np.int64), draw_at()
    for columns in COLUMNS:
        values = some_rows(columns)
        want, meant = reference.encoded(codec, values, draw, keys)
        for at in (0, 1):  # a payload may begin anywhere
            with guarded(want.size, np.uint8, at) as payload:
                codec.encode(values, payload, draw, keys)
                np.testing.assert_array_equal(payload, want)
                with guarded(values.size, np.float32, at) as flat:
                    codec.decode(payload, flat.reshape(values.shape))
                    assert flat.tobytes() == meant.tobytes()


@pytest.mark.parametrize("codec", ROW_QUANTIZERS, ids=str)
def test_deltas_are_those_of_the_definition(codec: RowQuantizer) -> None:
    keys, draw = np.arange(6), draw_at()
    for columns in (1, 7, 8, 63, 64, 65, 1000, 2049):
        values, message = some_rows(columns), some_rows(columns, 1)
        want, meant = reference.encoded(codec, values - message, draw, keys)
        payload, found = np.empty_like(want), message.copy()
        codec.encode_delta(values, found, payload, draw, keys)
        np.testing.assert_array_equal(payload, want)
        np.testing.assert_array_equal(found, message + meant)


def test_marks_are_a_bit_for_each_column() -> None:
    places, payload = np.array([0, 9, 3, 8], np.uint32), np.full(4, 0xFF, np.uint8)
    mark(places, 10, 2, payload)
    assert payload.tolist() == [1, 2, 8, 1]


@pytest.mark.parametrize("filler", [0, 0xFF, 0x55])
def test_damaged_marks_stay_within_their_rows(filler: int) -> None:
    found: Any = np.array([1, 2, 3, 4], np.float32)
    with guarded(20, np.float32) as out:
        spread(np.full(4, filler, np.uint8), 10, 2, found, out)
        values = out.reshape(2, 10)
        assert ((values != 0).sum(1) == (2 if filler else 0)).all()
