"""Codecs that know what they send: the same bytes as encoding, and the same values as decoding these."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomp.codecs import Draw, Quantizer
from mpicomp.codecs.error_feedback import ErrorAccumulation
from mpicomp.codecs.quantizer import Ternary
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.coded import FeedbackEncoder

CODECS = [
    Quantizer(bucket=100, levels=4, norm="linf"),
    Quantizer(bucket=64, levels=1, norm="l2"),
    Quantizer(bucket=4096, levels=127, norm="l2"),
    Quantizer(bucket=512, levels=2, norm="l2", coding="entropy"),
    Ternary(bucket=100),
    Ternary(bucket=70, coding="entropy"),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 63, 700, 20_000])
def test_what_is_told_is_what_is_decoded(codec: Quantizer, dtype: type, n: int) -> None:
    values = np.random.default_rng(n).standard_normal(n).astype(dtype)
    values[n // 3 : n // 2] = 0
    draw = Draw(Stream(5, 0, "code"), 3, 1)
    expected, found = (np.full(codec.nbytes(n), 255, np.uint8) for _ in range(2))
    decoded, told = np.full(n, np.nan, dtype), np.full(n, np.nan, dtype)
    codec.encode(values, expected, draw=draw)
    codec.decode(expected, decoded, weight=1)
    codec.encode_telling(values, found, told, draw=draw)
    assert (expected == found).all()
    assert told.tobytes() == decoded.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_values_that_are_not_finite_are_refused(codec: Quantizer) -> None:
    values = np.ones(700, np.float32)
    values[650] = np.inf
    with pytest.raises(ValueError, match="NaN or infinity"):
        codec.encode_telling(
            values, np.empty(codec.nbytes(700), np.uint8), np.empty_like(values), draw=Draw(Stream(5, 0, "code"), 3, 1)
        )


def test_error_feedback_does_not_decode_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, n = Quantizer(bucket=64, levels=2, norm="l2", coding="entropy"), 640
    worker = FeedbackEncoder(codec, ErrorAccumulation(0.2, 0.9), n, np.dtype(np.float32), n, Stream(5, 0, "code"), 0)
    values, sent = np.random.default_rng(0).standard_normal(n).astype(np.float32), np.empty(n, np.float32)
    payload = np.empty(codec.nbytes(n), np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(Quantizer, "decode", None)
        worker.encode(values, range(n), payload)
    worker.commit()
    codec.decode(payload, sent, weight=1)
    assert (worker.residual == values - sent).all()
