"""SparseLevels: the codec contract, the bytes, ties, tensors of every length, and a residual that decays."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.codecs.sparse_levels import SparseLevels
from tests.contracts import CompressorContract, draw_at, encoded, gaussian, guarded
from tests.reference.sparse import largest_in_levels, top, within_chunks
from tests.reference.vote_counts import planes


class SparseLevelsContract(CompressorContract):
    codec: ClassVar[SparseLevels]

    def test_wire_format_is_pinned(self) -> None:
        values, codec = gaussian(1000), self.codec
        payload, keep, bits = encoded(codec, values), codec.chunk // codec.rate, (codec.chunk - 1).bit_length()
        places = top(values, codec.chunk, keep)
        kept = largest_in_levels(values, codec.rate, codec.chunk, codec.bits)[places]
        words = 8 * -(-places.size // 64)
        start = 16 if codec.bits == 2 else -(-4 * places.size // 8) * 8
        head = payload[:start].view(np.float32)
        assert payload.size == codec.nbytes(1000) == start + words * (bits + (2 if codec.bits == 2 else 0))
        at = payload[start : start + words * bits].view(np.uint64)
        np.testing.assert_array_equal(at, planes(within_chunks(places, 1000, codec.chunk, keep), bits))
        if codec.bits == 32:
            np.testing.assert_array_equal(head[: kept.size], kept)
            assert not head[kept.size :].any()
        else:
            assert (np.diff(head[np.isin(head, kept)]) > 0).all()
            numbers = np.array([np.flatnonzero(head == value)[0] for value in kept], np.uint32)
            np.testing.assert_array_equal(payload[start + words * bits :].view(np.uint64), planes(numbers, 2))

    def test_damaged_places_write_inside_the_vector_alone(self) -> None:
        payload = encoded(self.codec, gaussian(130))
        payload[16:] = 0xFF
        with guarded(130, np.float32) as values:
            self.codec.decode(payload, values, weight=1)
            self.codec.add(payload, values)

    def test_tensors_are_encoded_each_for_itself(self) -> None:
        lengths = (1, 64, 65, 4097, 200, self.codec.chunk, 33)
        starts = np.cumsum([0, *(-(-length // 64) * 64 for length in lengths[:-1])])
        n = int(starts[-1]) + lengths[-1]
        codec, x = SparseLevels(self.codec.rate, self.codec.chunk, self.codec.bits, lengths), np.zeros(n, np.float32)
        want, out = np.zeros(n, np.float32), np.full(n, 77, np.float32)
        for start, length in zip(starts, lengths, strict=True):
            tensor = slice(start, start + length)
            x[tensor] = gaussian(length)
            want[tensor] = largest_in_levels(x[tensor], codec.rate, codec.chunk, codec.bits)
        codec.decode(encoded(codec, x), out, weight=1)
        np.testing.assert_array_equal(out, want)
        # nothing between tensors is sent or kept
        x[1:64] = 1e9
        residual, left = np.ones(n, np.float32), np.full(n, 77, np.float32)
        payload = np.empty(codec.nbytes(n), np.uint8)
        codec.encode_keeping(x, residual, payload, left)
        codec.decode(payload, out, weight=1)
        assert not left[1:64].any()
        assert not out[1:64].any()


class TestOneOf64InFourLevels(SparseLevelsContract):
    codec = SparseLevels()


class TestShortChunksInFourLevels(SparseLevelsContract):
    codec = SparseLevels(5, 70)


class TestOneOfEachChunkInFourLevels(SparseLevelsContract):
    codec = SparseLevels(10, 10)


class TestAllInFourLevels(SparseLevelsContract):
    codec = SparseLevels(1, 1)

    @pytest.mark.parametrize("magnitude", [1e39, 1e160, 1.7e308])
    def test_float64_values_beyond_float32_decode_to_finite_values(self, magnitude: float) -> None:
        """A level may stand for values of both signs, so the signs of single values are not kept."""
        for values in (np.full(100, magnitude), magnitude * (gaussian(100, np.float64) / 4)):
            assert np.isfinite(self.decoded(encoded(self.codec, values), 100, np.float64)).all()


class TestOneOf64InFloat32(SparseLevelsContract):
    codec = SparseLevels(bits=32)


class TestShortChunksInFloat32(SparseLevelsContract):
    codec = SparseLevels(5, 70, bits=32)


@pytest.mark.parametrize("n", [1, 10, 63, 64, 65, 4095, 4096, 4097, 4160, 4161, 8192])
def test_chunks_keep_64_of_4096_and_a_short_one_as_much_rounded_up(n: int) -> None:
    out = np.empty(n, np.float32)
    SparseLevels(bits=32).decode(encoded(SparseLevels(bits=32), np.arange(1, n + 1, dtype=np.float32)), out, weight=1)
    assert np.count_nonzero(out[: n // 4096 * 4096]) == n // 4096 * 64
    assert np.count_nonzero(out) == n // 4096 * 64 + -(-64 * (n % 4096) // 4096)


def test_an_element_of_a_long_tensor_takes_0_219_bits() -> None:
    n = 1 << 20
    assert SparseLevels().nbytes(n) == 16 + n // 64 * 14 // 8


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x, out = np.ones(4096 + 100, np.float32), np.empty(4096 + 100, np.float32)
    x[1::2] = -1
    SparseLevels().decode(encoded(SparseLevels(), x), out, weight=1)
    np.testing.assert_array_equal(np.flatnonzero(out), [*range(64), 4096, 4097])
    np.testing.assert_array_equal(out[:64], x[:64])


@pytest.mark.parametrize("value", [0.0, 0.1, -3e38, 1e-45])
def test_a_constant_tensor_comes_back_exactly(value: float) -> None:
    x, out = np.full(5000, value, np.float32), np.empty(5000, np.float32)
    SparseLevels().decode(encoded(SparseLevels(), x), out, weight=1)
    np.testing.assert_array_equal(out[out != 0], x[out != 0])
    assert value == 0 or np.count_nonzero(out) == 64 + 15


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [2, 32])
def test_nothing_is_lost_between_payload_and_residual(bits: Any, dtype: type) -> None:
    codec, n = SparseLevels(bits=bits), 10_000
    u, e = gaussian(n, dtype), gaussian(n, dtype, seed=1)
    payload, left, sent = np.empty(codec.nbytes(n), np.uint8), np.empty(n, dtype), np.empty(n, dtype)
    codec.encode_keeping(u, e, payload, left, decay=0.95)
    codec.decode(payload, sent, weight=1)
    p = dtype(0.95) * e + u
    np.testing.assert_array_equal(left, p - sent)
    exact = 0.95 * e.astype(np.float64) + u
    assert (np.abs(sent.astype(np.float64) + left - exact) <= 4 * np.finfo(dtype).eps * (np.abs(e) + np.abs(u))).all()


def test_gain_scales_decoded_values_and_leaves_the_residual_alone() -> None:
    n, zeros = 5000, np.zeros(5000, np.float32)
    plain, half = SparseLevels(), SparseLevels(gain=0.5)
    x, found = gaussian(n), []
    for codec in (plain, half):
        payload, left, out = np.empty(codec.nbytes(n), np.uint8), np.empty(n, np.float32), np.empty(n, np.float32)
        codec.encode_keeping(x, zeros, payload, left)
        codec.decode(payload, out, weight=1)
        found.append((payload, left, out))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_array_equal(found[0][2] / 2, found[1][2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate must be an integer of 1 to 2\\^32, not 0"),
        ({"rate": 64, "chunk": 100}, "chunk must be a multiple of rate, 64, not 100"),
        ({"chunk": None}, "chunk must be an integer of 1 to 2\\^32, not None"),
        ({"bits": 8}, "bits must be 2 or 32, not 8"),
        ({"gain": 0.0}, "gain must be a positive number that float32 represents, not 0.0"),
        ({"lengths": (0, 64)}, "lengths must be numbers of elements, 1 or more, not"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseLevels(**options)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[SparseLevels, np.ndarray[Any, Any]]:
    """Return a codec and a vector with ties, zeros and magnitudes far apart."""
    keep, rate = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    lengths = tuple(draw(st.lists(st.integers(1, 700), min_size=1, max_size=4)))
    n = sum(-(-length // 64) * 64 for length in lengths[:-1]) + lengths[-1]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = random.standard_normal(n) * 10.0 ** random.integers(-3, 4, n)
    x = np.where(random.random(n) < draw(st.sampled_from([0.0, 0.5, 1.0])), np.round(x), x)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return SparseLevels(rate, rate * keep, draw(st.sampled_from([2, 32])), lengths), x.astype(dtype)


@given(_cases())
def test_kernels_give_the_bits_of_the_plain_version(case: tuple[SparseLevels, np.ndarray[Any, Any]]) -> None:
    codec, x = case
    payload, out, start = np.empty(codec.nbytes(x.size), np.uint8), np.full(x.size, 77, x.dtype), 0
    codec.encode(x, payload, draw=draw_at())
    codec.decode(payload, out, weight=1)
    want = np.zeros_like(x)
    for length in codec.lengths or ():
        tensor = slice(start, start + length)
        want[tensor] = largest_in_levels(x[tensor], codec.rate, codec.chunk, codec.bits)
        start += -(-length // 64) * 64
    np.testing.assert_array_equal(out, want)
