"""Payloads that a device encodes, or decodes and averages, by one kernel: the CPU's bytes and bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.base import Draw
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.codecs.scaled_sign import OneBit, TwoMeans
from mpicomp.codecs.ternary import Ternary
from mpicomp.codecs.top_k import TopK
from mpicomp.feedback.error_feedback import take_mean
from mpicomp.kernels.streams import Stream
from tests.unit.kernels.gpu.side_by_side import FLOATS, assert_same, numbers

STREAM = Stream(3, 1, "payloads")
CODECS: tuple[Any, ...] = (
    Quantizer(bucket=64, levels=4), Quantizer(bucket=100, levels=7, norm="l2"), Quantizer(bucket=4096, levels=100),
    Quantizer(bucket=96, levels=16), Ternary(),
    OneBit(bucket=512), OneBit(bucket=100, scale="l1"), TwoMeans(bucket=128), TwoMeans(bucket=5000),
    TopK(rate=1), TopK(rate=7), TopK(rate=100), TopK(rate=50, chunk=200), TopK(rate=10, chunk=200), TopK(rate=2500),
)  # fmt: skip
LENGTHS = (1, 63, 65, 1000, 5101)


def payloads_of(codec: Any, ranks: int, n: int, dtype: Any, damaged: bool) -> NDArray[np.uint8]:
    """Payloads of some ranks, uint8[ranks, nbytes]; damaged ones are random bytes."""
    found = np.empty((ranks, codec.nbytes(n)), np.uint8)
    for rank, payload in enumerate(found):
        if damaged:
            payload[:] = np.random.default_rng([rank, n]).integers(0, 256, payload.size)
        else:
            codec.encode(numbers(n, dtype, rank), payload, draw=Draw(STREAM, 5, rank))
    return found


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("dtype", "damaged"), [(np.float32, False), (np.float64, False), (np.float32, True)])
def test_the_mean_of_all_ranks_payloads_is_the_cpus(
    to_device: Any, to_host: Any, codec: Any, dtype: Any, damaged: bool
) -> None:
    for n, ranks in zip(LENGTHS, (1, 5, 2, 3, 2), strict=True):
        payloads = payloads_of(codec, ranks, n, dtype, damaged)
        room = -(-payloads.shape[1] // 64) * 64 + 64  # payloads lie apart from each other
        apart = np.zeros((ranks, room), np.uint8)
        apart[:, : payloads.shape[1]] = payloads
        expected = np.full(n, 7, dtype)
        with np.errstate(all="ignore"):
            take_mean(codec, [*payloads], expected, np.empty_like(expected))
            mean = to_device(np.full(n, 7, dtype))
            finite = codec.mean(to_device(apart, 0)[:, : payloads.shape[1]], mean)
        assert_same(to_host(mean), expected, (n, ranks))
        assert finite.item() == np.isfinite(expected).all()


@pytest.mark.parametrize(
    ("rate", "double", "dtype"),
    [
        (1, False, np.float32), (1, True, np.float64), (7, True, np.float32), (7, False, np.float64),
        (100, False, np.float32), (100, True, np.float64), (128, True, np.float32), (128, False, np.float64),
    ],
)  # fmt: skip
def test_the_largest_of_short_chunks_are_encoded_to_the_cpus_bytes(
    to_device: Any, to_host: Any, rate: int, double: bool, dtype: Any
) -> None:
    codec, draw = TopK(rate=rate, double=double), Draw(STREAM, 5, 0)
    for n in LENGTHS:
        x, residual = numbers(n, dtype), numbers(n, dtype, 1)
        x[n // 2] *= 1e30  # beyond float32 in float64 twice
        x[n // 3] *= 1e10
        ours, left = np.full(codec.nbytes(n), 99, np.uint8), np.full(n, 7, dtype)
        theirs, their_left = to_device(ours, 8), to_device(left)
        codec.encode(x, ours, draw=draw)
        assert codec.encode(to_device(x), theirs, draw=draw).item()
        np.testing.assert_array_equal(to_host(theirs), ours)
        codec.encode_keeping(x, residual, ours, left)
        assert codec.encode_keeping(to_device(x), to_device(residual), theirs, their_left).item()
        np.testing.assert_array_equal(to_host(theirs), ours)
        assert_same(to_host(their_left), left, n)


@FLOATS
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_encoding_short_chunks_reports_values_that_are_not_finite(to_device: Any, dtype: Any, strange: float) -> None:
    codec, x = TopK(rate=100), numbers(1000, dtype)
    x[777] = strange
    payload, left = to_device(np.zeros(codec.nbytes(1000), np.uint8), 8), to_device(x)
    assert not codec.encode(to_device(x), payload, draw=Draw(STREAM, 5, 0)).item()
    assert not codec.encode_keeping(to_device(x), to_device(x), payload, left).item()
