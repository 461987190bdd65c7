"""Codecs with numbers per bucket, and clipping: contract, definition in plain NumPy, sizes, zeros, unbiasedness."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomp.codecs import Bucketed, Clipping, Codec, OneBit, Quantizer, Ternary, TwoMeans, compressor
from tests.contracts import CompressorContract, check_several_at_once, draw_at, encoded, gaussian
from tests.reference.compressors import decoded as reference
from tests.reference.statistics import assert_binomial

LENGTHS = (0, 1, 63, 64, 65, 1000, 10_000)
CODECS: tuple[Codec, ...] = (
    Quantizer(),
    Quantizer(bucket=100, levels=1, norm="l2"),
    Quantizer(bucket=7, levels=3),
    Quantizer(bucket=5000, levels=127, norm="l2"),
    Quantizer(bucket=4096, coding="entropy", norm="l2"),
    Quantizer(bucket=30, levels=127, coding="entropy"),
    Ternary(bucket=300),
    Ternary(bucket=70, coding="entropy"),
    OneBit(bucket=7),
    OneBit(bucket=5000, scale="l1"),
    OneBit(bucket=64, scale="l1"),
    OneBit(bucket=1),
    TwoMeans(bucket=1),
    TwoMeans(bucket=64),
    TwoMeans(bucket=9000),
    Clipping(9),
    Clipping(16),
    Clipping(27),
    Clipping(32),
)


class TestQuantizer(CompressorContract):
    codec = Quantizer(bucket=100)


class TestQuantizerByLength(CompressorContract):
    codec = Quantizer(bucket=4096, levels=1, norm="l2")


class TestQuantizerWithEntropyCoding(CompressorContract):
    codec = Quantizer(bucket=512, coding="entropy")


class TestTernary(CompressorContract):
    codec = Ternary(bucket=256)


class TestOneBit(CompressorContract):
    codec = OneBit(bucket=100)


class TestOneBitByMagnitude(CompressorContract):
    codec = OneBit(bucket=4096, scale="l1")


class TestTwoMeans(CompressorContract):
    codec = TwoMeans(bucket=100)


class TestClipping(CompressorContract):
    codec = Clipping(12)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_is_what_the_definition_says_at_every_length(codec: Codec) -> None:
    for n in LENGTHS:
        for dtype in (np.float32, np.float64):
            values = gaussian(n, dtype)
            values[::5] = 0
            found = np.empty_like(values)
            codec.decode(encoded(codec, values), found, weight=1)
            np.testing.assert_array_equal(found, reference(codec, values, draw_at()))
            check_several_at_once(codec, n, dtype)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_piece_decodes_as_its_part_of_the_whole(codec: Codec) -> None:
    n = 2 * codec.alignment + 70
    values, whole = gaussian(n), np.empty(n, np.float32)
    codec.decode(encoded(codec, values, draw_at()), whole, weight=1)
    for start in (0, codec.alignment):
        part = np.empty(n - start, np.float32)
        codec.decode(encoded(codec, values[start:], draw_at(offset=start)), part, weight=1)
        np.testing.assert_array_equal(part, whole[start:])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_decode_to_exactly_zero(codec: Codec) -> None:
    zeros, found = np.zeros(1000, np.float32), np.full(1000, 7, np.float32)
    codec.decode(encoded(codec, zeros), found, weight=1)
    assert not found.any()
    assert not np.signbit(found).any()


def test_sizes_and_alignments_are_the_buckets_numbers_and_whole_words_of_bits() -> None:
    assert [Quantizer(bucket=512, levels=4).nbytes(n) for n in (0, 1, 512, 513)] == [0, 40, 264, 296]
    assert [Quantizer(bucket=512, levels=s).bits for s in (1, 2, 3, 4, 7, 8, 127)] == [2, 3, 3, 4, 4, 5, 8]
    assert [TwoMeans(bucket=100).nbytes(n) for n in (64, 200, 201)] == [16, 16 + 32, 24 + 32]
    assert [Clipping(bits).nbytes(64) for bits in (9, 16, 32)] == [72, 128, 256]
    assert [codec.alignment for codec in CODECS if isinstance(codec, Bucketed)][:3] == [4096, 1600, 448]


def test_few_codes_that_are_not_zero_take_250_times_less_than_float32() -> None:
    codec, rng, sent = Quantizer(bucket=5000, levels=1, norm="l2", coding="entropy"), np.random.default_rng(0), 0
    for step in range(10):
        values = np.where(rng.random(5000) < 0.13, rng.standard_normal(5000), 0).astype(np.float32)
        payload = encoded(codec, values, draw_at(step))
        length = int.from_bytes(payload[4:6].tobytes(), "little")
        assert codec.count_used(payload, 5000) == 4 + 2 + length
        sent += 4 + 2 + length
    assert sent / 10 < 20_000 / 250


def test_codes_of_normal_values_take_90_times_less_than_float32() -> None:
    """The paper claims 80 times; the entropy of the symbols allows 92.8 times."""
    codec, n = Quantizer(bucket=4096, levels=4, norm="l2", coding="entropy"), 1 << 18
    payload, found = encoded(codec, gaussian(n)), np.empty(n, np.float32)
    assert 4 * n / codec.count_used(payload, n) > 90
    codec.decode(payload, found, weight=1)
    np.testing.assert_array_equal(found, reference(codec, gaussian(n), draw_at()))


@pytest.mark.parametrize(("n", "length_bytes"), [(1, 1), (508, 1), (509, 2), (100_000, 2), (200_000, 3)])
def test_the_length_of_a_message_takes_the_bytes_that_the_longest_needs(n: int, length_bytes: int) -> None:
    """With 9 levels a byte has 2 symbols; 1 byte names the coding of the message."""
    codec = Quantizer(bucket=1 << 20, coding="entropy")
    most = 4 + length_bytes + 1 + -(-n // 2)
    assert codec.nbytes(n) == -(-most // 8) * 8
    payload = np.full(codec.nbytes(n), 0xFF, np.uint8)
    assert codec.count_used(payload, n) == min(4 + length_bytes + 256**length_bytes - 1, payload.size)


@pytest.mark.parametrize(
    "codec", [Quantizer(bucket=8, levels=2, norm="l2"), Quantizer(bucket=8, levels=4), Quantizer(bucket=3, levels=1)]
)
def test_quantized_mean_is_the_value(codec: Quantizer) -> None:
    values, steps = np.array([0.75, -0.5, 0.25, 0.0, -0.125, 0.3, 1.0, -0.01], np.float32), 4000
    ups = np.zeros(8, np.int64)
    scales = np.repeat(codec.scales(values), codec.bucket)[:8].astype(np.float64)
    place = np.abs(values.astype(np.float64)) / scales * codec.levels
    for step in range(steps):
        found = np.empty(8, np.float32)
        codec.decode(encoded(codec, values, draw_at(step)), found, weight=1)
        level = np.abs(found.astype(np.float64)) / scales * codec.levels
        assert (np.sign(found) * np.sign(values) >= 0).all()
        up = np.rint(level - np.floor(place))
        assert set(up) <= {0, 1}
        ups += up.astype(np.int64)
    for i in range(8):
        assert_binomial(ups[i], steps, float(place[i] - np.floor(place[i])), f"element {i}")


@pytest.mark.parametrize(("d", "s"), [(64, 1), (512, 4), (4096, 4), (4096, 64)])
def test_quantizer_keeps_its_variance_bound(d: int, s: int) -> None:
    codec, values, errors = Quantizer(d, s, "l2"), gaussian(d), []
    for step in range(50):
        found = np.empty(d, np.float32)
        codec.decode(encoded(codec, values, draw_at(step)), found, weight=1)
        errors.append(float(((found - values).astype(np.float64) ** 2).sum()))
    bound = min(d / s**2, np.sqrt(d) / s) * float((values.astype(np.float64) ** 2).sum())
    assert np.mean(errors) + 5 * np.std(errors) / np.sqrt(50) <= bound


def test_ternary_keeps_the_length() -> None:
    values, found = gaussian(256), np.empty(256, np.float32)
    codec = Ternary(bucket=256)
    codec.decode(encoded(codec, values), found, weight=1)
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(values), rel=1e-6)


def test_scales_beyond_float32_are_its_largest_number() -> None:
    values, found = np.full(64, 1e300), np.empty(64)
    for codec in (Quantizer(64, 4, "linf"), OneBit(64), OneBit(64, "l1"), TwoMeans(64)):
        codec.decode(encoded(codec, values), found, weight=1)
        assert np.isfinite(found).all()
        assert (found > 1e37).all()


class TestCompressorsByName:
    def test_options_follow_a_colon(self) -> None:
        assert compressor("one-bit:bucket=512,scale=l1") == OneBit(512, "l1")
        assert compressor("quantize") == Quantizer()
        assert compressor(Clipping(12)) == Clipping(12)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("zip", "there is no compressor 'zip': choose one of one-bit"),
            ("one-bit:512", "write options as name=value, not '512'"),
            ("one-bit:size=3", "size"),
            ("clip:bits=40", "^compressor 'clip:bits=40': bits must be an integer of 9 to 32, not 40$"),
        ],
    )
    def test_what_is_wrong_is_said(self, text: str, told: str) -> None:
        with pytest.raises(ValueError, match=told):
            compressor(text)
