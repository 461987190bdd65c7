"""Sums and residuals of error feedback, against NumPy: the same bits, and whether they are finite."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomp.codecs import Codec, Quantizer, SparseLevels, TopK
from mpicomp.feedback.error_feedback import ErrorAccumulation, ErrorFeedback, FeedbackEncoder
from mpicomp.kernels.streams import Stream
from mpicomp.spaces import HOST

LENGTHS = (1, 15, 16, 17, 1000)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_operation_is_rounded(dtype: type) -> None:
    alpha, beta = dtype(0.3), dtype(0.9)
    for n in LENGTHS:
        values, residual, sent, out, kept = np.random.default_rng(n).standard_normal((5, n)).astype(dtype)
        ErrorFeedback().compensate(values, residual, out)
        np.testing.assert_array_equal(out, values + residual)
        assert ErrorFeedback().keep(values, out, sent, residual, kept)
        np.testing.assert_array_equal(kept, out - sent)
        ErrorFeedback(0.3).compensate(values, residual, out)
        np.testing.assert_array_equal(out, residual * alpha + values)
        assert ErrorFeedback(0.3).keep(values, out, sent, residual, kept)
        np.testing.assert_array_equal(kept, out - sent)
        ErrorAccumulation(0.3, 0.9).compensate(values, residual, out)
        np.testing.assert_array_equal(out, residual * alpha + values)
        assert ErrorAccumulation(0.3, 0.9).keep(values, out, sent, residual, out)
        np.testing.assert_array_equal(out, residual * beta + (values - sent))


@pytest.mark.parametrize("feedback", [ErrorFeedback(), ErrorAccumulation(0.3, 0.9)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 31, 40])
def test_what_is_not_finite_is_told(feedback: ErrorFeedback | ErrorAccumulation, bad: float, at: int) -> None:
    values, compensated, sent, residual, out = np.ones((5, 41), np.float32)
    assert feedback.keep(values, compensated, sent, residual, out)
    sent[at] = bad
    assert not feedback.keep(values, compensated, sent, residual, out)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("codec", [SparseLevels(10, 70), TopK(10, 70)], ids=["in the codec", "in passes"])
def test_a_residual_decays_before_it_is_added(codec: Codec, dtype: type) -> None:
    """TopK adds a residual as it is, so the rule computes the sum before it encodes."""
    n, decay = 700, dtype(0.9)
    worker = FeedbackEncoder(HOST, codec, ErrorFeedback(0.9), n, dtype, n, Stream(5, 0, "code"), 0)
    payload, sent, kept = np.empty(codec.nbytes(n), np.uint8), np.empty(n, dtype), np.zeros(n, dtype)
    for step in range(3):
        values = np.random.default_rng(step).standard_normal(n).astype(dtype)
        worker.begin(step)
        worker.encode(values, range(n), payload)
        worker.residual.commit()
        codec.decode(payload, sent, weight=1)
        kept = decay * kept + values - sent
        np.testing.assert_array_equal(worker.residual.current, kept)


def test_error_feedback_does_not_decode_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, n = Quantizer(bucket=64, levels=2, norm="l2", coding="entropy"), 640
    worker = FeedbackEncoder(HOST, codec, ErrorAccumulation(0.2, 0.9), n, np.float32, n, Stream(5, 0, "code"), 0)
    values, sent = np.random.default_rng(0).standard_normal(n).astype(np.float32), np.empty(n, np.float32)
    payload = np.empty(codec.nbytes(n), np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(Quantizer, "decode", None)
        worker.encode(values, range(n), payload)
    worker.residual.commit()
    codec.decode(payload, sent, weight=1)
    assert (worker.residual.current == values - sent).all()
