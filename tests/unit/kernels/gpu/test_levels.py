"""Levels on the GPU: the CPU's codes, scales and errors, of sums in the same order, and its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs import Levels
from mpicomp.feedback.relayed_sums import TensorLevels
from tests.contracts import draw_at
from tests.unit.kernels.gpu.side_by_side import FLOATS, assert_same

LEVELS = (16, 2, 3, 4, 8, 256)  # the largest kernels first, which are the ones that `test_compiles.py` compiles
# whole programs of short buckets, and ragged ones; a row that a word needs not; buckets longer than a program
LAYOUTS = ((128, (1024, 70, 1)), (192, (250,)), (2048, (1100, 65)))
BASE = 640  # number of the first element
every_count = pytest.mark.parametrize("levels", LEVELS)
Array = NDArray[Any]


class Piece:
    """Buckets of some tensors, on both devices."""

    def __init__(self, levels: int, bucket: int, lengths: Sequence[int], both: Both) -> None:
        self.n = sum(-(-length // 64) * 64 for length in lengths)
        self.codec, self.both = TensorLevels(levels, bucket, tensor_lengths=tuple(lengths)), both
        found = self.codec.buckets(self.n)
        self.buckets = found._replace(starts=found.starts + BASE)
        self.there = self.buckets.on(lambda table: both.to_device(table, 0))

    def values(self, seed: int, dtype: Any) -> Array:
        """Normal values of very different magnitudes, and zeros: of both signs, between tensors, of whole buckets."""
        rng, out = np.random.default_rng((seed, self.n)), np.zeros(self.n, dtype)
        for start, length in zip(self.buckets.starts - BASE, self.buckets.lengths, strict=True):
            magnitude = 10 ** rng.uniform(-4, 2) * (rng.random() > 0.1)
            out[start : start + length] = magnitude * rng.standard_normal(length)
        out[::7] *= 0
        return out

    def payload(self) -> NDArray[np.uint8]:
        return np.full(self.buckets.nbytes, 0xA5, np.uint8)

    def relay(self, left: Array, payload: Any = None, own: Any = None, incoming: Any = None) -> bool:
        return self.both(
            lambda buckets, left, payload, u, e, incoming: self.codec.relay(
                buckets, left, payload, None if own is None else (u, e), incoming, BASE
            ),
            self, left, payload, *(own or (None, None)), incoming,
        )  # fmt: skip

    def spread(self, payload: Any, ranks: int, out: Array) -> bool:
        return self.both(
            lambda buckets, payload, out: self.codec.spread(buckets, payload, ranks, BASE, out), self, payload, out
        )


class Both:
    """Calls a function with arrays of the host, which it changes, and with copies on the device."""

    def __init__(self, to_device: Any, to_host: Any) -> None:
        self.to_device, self.to_host = to_device, to_host

    def __call__(self, work: Callable[..., Any], piece: Piece | None, *arrays: Any) -> bool:
        """Fail unless the arrays and the result, whether all is finite, are the same on both."""
        # codes are words: they begin at multiples of 8 bytes
        there = [None if a is None else self.to_device(a, 16 if a.dtype == np.uint8 else 1) for a in arrays]
        before = [] if piece is None else [piece.buckets]
        with np.errstate(all="ignore"):
            expected = work(*before, *arrays)
        found = work(*([] if piece is None else [piece.there]), *there)
        for number, (one, other) in enumerate(zip(there, arrays, strict=True)):
            if other is not None:
                assert_same(self.to_host(one), other, number)
        if expected is not None:
            assert_same(np.array(bool(found)), np.array(expected), "finite")
        return bool(expected)


@pytest.fixture
def both(to_device: Any, to_host: Any) -> Both:
    return Both(to_device, to_host)


@every_count
@FLOATS
def test_hops_have_the_cpus_bits(both: Both, levels: int, dtype: Any) -> None:
    """The first one adds a vector and its residual, the second a code too, the third two codes, one after the other."""
    for bucket, lengths in LAYOUTS if dtype == np.float32 else LAYOUTS[:1]:
        piece = Piece(levels, bucket, lengths, both)
        payload = piece.payload()
        assert piece.relay(np.zeros(piece.n, dtype), payload, (piece.values(0, dtype), piece.values(1, dtype)))
        following = piece.payload()
        own = piece.values(2, dtype), piece.values(3, dtype)
        assert piece.relay(np.zeros(piece.n, dtype), following, own, payload)
        left = np.zeros(piece.n, dtype)
        piece.relay(left, None, (piece.values(4, dtype), None), payload)
        assert piece.relay(left, payload, None, following)
        assert piece.spread(payload, 3, np.full(piece.n, 7, dtype))


@every_count
def test_magnitudes_at_the_ends_of_float32_have_the_cpus_bits(both: Both, levels: int) -> None:
    piece = Piece(levels, 64, (64 * 16,), both)
    magnitudes = (1e-45, 1e-43, 1e-40, 1e-36, 2e-36, 1e-30, 1e-23, 1e-19, 1e10, 1e17, 1e18, 2e19, 1e30, 1e36, 3e38, 0)
    v = (piece.values(0, np.float32).clip(-1, 1) * np.repeat(magnitudes, 64)).astype(np.float32)
    payload = piece.payload()
    piece.relay(v.copy(), payload)
    piece.relay(v.copy(), piece.payload(), None, payload)
    piece.spread(payload, 5, v)


@every_count
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_spoils_its_bucket_as_on_the_cpu(both: Both, levels: int, bad: float) -> None:
    piece = Piece(levels, 128, (600, 100), both)
    u, payload, zeros = piece.values(0, np.float32), piece.payload(), np.zeros(piece.n, np.float32)
    u[200] = bad
    assert not piece.relay(zeros.copy(), payload, (u, zeros))
    assert not piece.relay(zeros.copy(), piece.payload(), (zeros, zeros), payload)
    assert not piece.spread(payload, 2, zeros)


@every_count
def test_any_bytes_are_decoded_as_on_the_cpu(both: Both, levels: int) -> None:
    """Bytes that no five digits make, too, and scales that are negative or not finite."""
    piece = Piece(levels, 128, (1300, 70), both)
    payload = np.random.default_rng(levels).integers(0, 256, piece.buckets.nbytes, np.uint8)
    payload[-8:] = np.array([0x7FC0, 0x7F80, 0xFF7F, 0], np.uint16).view(np.uint8)
    assert not piece.spread(payload, 3, np.zeros(piece.n, np.float32))
    piece.relay(piece.values(0, np.float32), None, None, payload)


@every_count
@FLOATS
def test_the_codec_has_the_cpus_bits(both: Both, levels: int, dtype: Any) -> None:
    codec, n, rng = Levels(levels, 64), 333, np.random.default_rng(levels)
    u, e, left = (rng.standard_normal(n).astype(dtype) for _ in range(3))
    payload, other, decoded = (
        np.empty(codec.nbytes(n), np.uint8),
        np.empty(codec.nbytes(n), np.uint8),
        np.empty(n, dtype),
    )
    both(lambda u, payload: codec.encode(u, payload, draw=draw_at()), None, u, other)
    both(codec.encode_keeping, None, u, e, payload, left)
    both(lambda payload, out: codec.decode(payload, out, weight=1), None, payload, decoded)
    both(codec.add, None, other, decoded)
    expected = decoded / dtype(2)
    rows = np.zeros((2, -(-payload.size // 8) * 8 + 8), np.uint8)  # as `Payloads.rows` gives them
    rows[:, : payload.size] = payload, other
    mean = both.to_device(np.zeros(n, dtype))
    flag = codec.mean(both.to_device(rows, 16)[:, : payload.size], mean)
    assert_same(both.to_host(mean), expected, "mean")
    assert_same(np.array(bool(flag)), np.array(True), "finite")
