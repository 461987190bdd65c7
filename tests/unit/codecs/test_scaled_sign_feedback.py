"""Error feedback in one go with encoding: the same bits as adding, encoding, decoding and subtracting."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomp.codecs.base import Draw
from mpicomp.codecs.scaled_sign import OneBit, TwoMeans
from mpicomp.kernels.streams import Stream

DRAW = Draw(Stream(0, 0, "none is drawn"), 0, 0)
CODECS = [
    *(OneBit(bucket, scale) for bucket in (1, 7, 64, 100, 4096, 5000) for scale in ("l2", "l1")),
    *(TwoMeans(bucket) for bucket in (1, 7, 64, 100, 4096, 5000)),
]
LENGTHS = (1, 63, 64, 65, 1000, 9001)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_payload_and_what_is_left_are_those_of_four_steps(codec: OneBit | TwoMeans, dtype: type) -> None:
    for n in LENGTHS:
        values, residual = np.random.default_rng(n).standard_normal((2, n)).astype(dtype)
        values[::5] = -residual[::5]  # zeros count as positive
        p = values + residual
        payload, found = np.full((2, codec.nbytes(n)), 0xAA, np.uint8)
        decoded, left = np.empty(n, dtype), np.full(n, 7, dtype)
        codec.encode(p, payload, draw=DRAW)
        codec.decode(payload, decoded, weight=1)
        codec.encode_keeping(values, residual, found, left)
        np.testing.assert_array_equal(found, payload)
        np.testing.assert_array_equal(left.view(np.uint8), (p - decoded).view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_adding_a_payload_is_decoding_and_adding(codec: OneBit | TwoMeans, dtype: type) -> None:
    for n in LENGTHS:
        values, sums = np.random.default_rng(n).standard_normal((2, n)).astype(dtype)
        payload, decoded = np.empty(codec.nbytes(n), np.uint8), np.empty(n, dtype)
        codec.encode(values, payload, draw=DRAW)
        codec.decode(payload, decoded, weight=1)
        expected = sums + decoded
        codec.add(payload, sums)
        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("codec", [OneBit(100), OneBit(100, "l1"), TwoMeans(100)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 150, 64 * 4 + 3])
def test_a_sum_that_is_not_finite_is_refused(codec: OneBit | TwoMeans, bad: float, at: int) -> None:
    values, residual, left = np.ones((3, 260), np.float32)
    residual[at] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        codec.encode_keeping(values, residual, np.empty(codec.nbytes(260), np.uint8), left)


def test_a_sum_that_overflows_is_refused() -> None:
    values, residual, left = np.full((3, 70), 3e38, np.float32)
    with pytest.raises(ValueError, match="NaN or infinity"):
        OneBit(64).encode_keeping(values, residual, np.empty(OneBit(64).nbytes(70), np.uint8), left)
