"""Kernels of few levels: sums of a rank's vector, its residual and codes that it received, encoded in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numba import typeof
from numpy.typing import NDArray

from collectives.arrays.elements import aligned_empty
from mpicomp.codecs.level_buckets import Buckets
from mpicomp.codecs.levels import Levels
from mpicomp.feedback.relayed_sums import TensorLevels
from mpicomp.kernels.cpu.levels import PACKING, relay
from tests.contracts import guarded
from tests.reference.levels import coded

LEVELS = (2, 3, 4, 8, 16, 256)
TENSORS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((64,), 64), ((1,), 128), ((128 * 40,), 128), ((5003,), 128), ((100, 1, 600, 64, 374), 128),
    ((64, 64, 128, 65, 1000), 64), ((17 * 320 + 3, 320), 320), ((65, 65536 + 70), 65536),
)  # fmt: skip
BASE = 1000  # number of a piece's first element
every_count = pytest.mark.parametrize("levels", LEVELS)
Vector = NDArray[Any]


class Piece:
    """Buckets of some tensors, as the piece of a vector that begins at `BASE`."""

    def __init__(self, levels: int, bucket: int, lengths: Sequence[int], gap_behind: bool) -> None:
        padded = [-(-length // 64) * 64 for length in lengths]
        self.n = sum(padded) if gap_behind else sum(padded[:-1]) + lengths[-1]
        self.levels, self.codec = levels, TensorLevels(levels, bucket, tensor_lengths=tuple(lengths))
        found = self.codec.buckets(self.n)
        self.parts = [slice(a, a + n) for a, n in zip(found.starts, found.lengths, strict=True)]
        self.buckets = Buckets(found.starts + BASE, found.lengths, found.places)

    def values(self, seed: int, dtype: Any) -> Vector:
        """Normal values of very different magnitudes, with zeros between tensors and of whole buckets."""
        rng, out = np.random.default_rng((seed, self.n)), np.zeros(self.n, dtype)
        for part in self.parts:
            magnitude = 10 ** rng.uniform(-4, 2) * (rng.random() > 0.05)
            out[part] = magnitude * rng.standard_normal(part.stop - part.start)
        return out

    def payload(self) -> NDArray[np.uint8]:
        return np.full(self.buckets.nbytes, 0xA5, np.uint8)

    def decoded(self, v: Vector) -> Vector:
        """Return the decoded values of the codes of `v`."""
        out = np.zeros(self.n, np.float32)
        for part in self.parts:
            out[part] = coded(v[part], self.levels)[2]
        return out

    def relay(self, left: Vector, payload: Any, own: Any = None, incoming: Any = None, streaming: bool = False) -> bool:
        return self.codec.relay(self.buckets, left, payload, own, incoming, BASE, streaming)

    def spread(self, payload: NDArray[np.uint8], ranks: int, dtype: Any = np.float32) -> Vector:
        with guarded(self.n, dtype) as out:
            assert self.codec.spread(self.buckets, payload, ranks, BASE, out)
        return out


@every_count
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_pass_adds_encodes_and_keeps_the_error(levels: int, dtype: Any) -> None:
    for number, (lengths, bucket) in enumerate(TENSORS):
        piece = Piece(levels, bucket, lengths, gap_behind=number % 2 == 0)
        sent = np.zeros(piece.n, np.float32)
        received = None
        for hop in range(3):
            u, e = piece.values(2 * hop, dtype), piece.values(2 * hop + 1, dtype)
            before, payload = (u.copy(), e.copy()), piece.payload()
            v = (u + e).astype(np.float32) + sent
            with guarded(piece.n, dtype) as left:
                left[:] = 0
                assert piece.relay(left, payload, (u, e), received)
            sent = piece.decoded(v)
            np.testing.assert_array_equal(left, v - sent, f"{lengths}, hop {hop}")
            np.testing.assert_array_equal(piece.spread(payload, 1), sent)
            np.testing.assert_array_equal((u, e), before)
            received = payload
        np.testing.assert_array_equal(piece.spread(payload, 3, dtype), (sent / np.float32(3)).astype(dtype))


@every_count
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_codes_of_several_ranks_are_added_one_by_one(levels: int, dtype: Any) -> None:
    for lengths, bucket in TENSORS:
        piece = Piece(levels, bucket, lengths, gap_behind=True)
        received = [piece.payload() for _ in range(3)]
        for seed, payload in enumerate(received):
            assert piece.relay(piece.values(seed, np.float32), payload)
        u, e, left, payload = piece.values(7, dtype), piece.values(8, dtype), np.zeros(piece.n, dtype), piece.payload()
        v = (u + e).astype(np.float32)
        for number, one in enumerate(received):
            last = number == len(received) - 1
            piece.relay(left, payload if last else None, None if number else (u, e), one)
            v = v + piece.decoded(piece.values(number, np.float32))
            if not last:
                np.testing.assert_array_equal(left, v)
        np.testing.assert_array_equal(left, v - piece.decoded(v))
        np.testing.assert_array_equal(piece.spread(payload, 1), piece.decoded(v))


@every_count
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_storing_past_the_caches_gives_the_same_bits(levels: int, dtype: Any) -> None:
    for lengths, bucket in TENSORS:
        piece = Piece(levels, bucket, lengths, gap_behind=True)
        own = piece.values(1, dtype), piece.values(2, dtype)
        found = []
        for streaming in (False, True):
            left, payload = aligned_empty(piece.n, dtype), piece.payload()
            left[:] = 0
            piece.relay(left, payload, own, streaming=streaming)
            found.append((left.tobytes(), payload.tobytes()))
        assert found[0] == found[1], lengths


@every_count
def test_memory_between_tensors_is_neither_read_nor_kept(levels: int) -> None:
    piece = Piece(levels, 128, (100, 1, 600, 64, 374), gap_behind=True)
    u, e, gaps = piece.values(1, np.float32), piece.values(2, np.float32), np.ones(piece.n, bool)
    for part in piece.parts:
        gaps[part] = False
    clean, payload = piece.payload(), piece.payload()
    piece.relay(np.zeros(piece.n, np.float32), clean, (u, e))
    u[gaps] = np.nan
    left = np.full(piece.n, 5, np.float32)
    assert piece.relay(left, payload, (u, e))
    np.testing.assert_array_equal(payload, clean)
    assert (left[gaps] == 5).all()
    assert not piece.spread(payload, 1)[gaps].any()


@every_count
def test_a_value_that_is_not_finite_spoils_every_later_sum(levels: int) -> None:
    piece = Piece(levels, 64, (1000,), gap_behind=False)
    fine = piece.values(1, np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 63, 500, 999):
            u, left, payload, following = fine.copy(), np.zeros(piece.n, np.float32), piece.payload(), piece.payload()
            u[place] = bad
            assert not piece.relay(left, payload, (u, fine))
            assert not piece.codec.spread(piece.buckets, payload, 2, BASE, np.empty(piece.n, np.float32))
            # the next rank's numbers are finite, and its code still has a scale of NaN
            assert not piece.relay(left, following, (fine, fine), payload)


@every_count
def test_sums_that_overflow_are_not_finite(levels: int) -> None:
    codec, large, left = Levels(levels), np.full(128, 3e38, np.float32), np.zeros(128, np.float32)
    assert not codec.relay(codec.buckets(128), left, np.empty(codec.nbytes(128), np.uint8), (large, large))


@every_count
def test_buckets_of_the_longest_length_are_those_of_the_reference(levels: int) -> None:
    codec = Levels(levels, 65536)
    values = np.random.default_rng(1).standard_normal(3 * 65536 + 77).astype(np.float32)
    out, payload = np.empty_like(values), np.empty(codec.nbytes(values.size), np.uint8)
    codec.relay(codec.buckets(values.size), values.copy(), payload)
    codec.spread(codec.buckets(values.size), payload, 1, 0, out)
    for start in range(0, values.size, 65536):
        np.testing.assert_array_equal(out[start : start + 65536], coded(values[start : start + 65536], levels)[2])


def test_each_number_of_levels_has_a_compiled_form_and_a_file_of_its_own() -> None:
    """The number is a constant there: in one file, a process would run the form of another number."""
    assert {*PACKING} == {*LEVELS}
    assert len({relay._cache.file_of(typeof(packing)) for packing in PACKING.values()}) == len(LEVELS)
