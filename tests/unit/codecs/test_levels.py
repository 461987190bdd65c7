"""Levels: the codec contract, the bytes, the edges of its range, and its error for each number of levels."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs import Levels, compressor
from tests.contracts import CompressorContract, check_adding, draw_at, encoded, gaussian, guarded
from tests.reference.levels import EVEN, coded, in_levels, payload

LEVELS = (2, 3, 4, 8, 16, 256)
BITS = {2: 1, 3: 1.6, 4: 2, 8: 3, 16: 4, 256: 8}
LENGTHS = (0, 1, 5, 63, 64, 65, 127, 128, 129, 191, 1000, 16 * 128, 17 * 128 + 1, 5003)
every_count = pytest.mark.parametrize("levels", LEVELS)


def decoded(codec: Levels, values: NDArray[Any]) -> NDArray[Any]:
    found = np.full_like(values, 77)
    codec.decode(encoded(codec, values), found, weight=1)
    return found


class LevelsContract(CompressorContract):
    """Contract but for the largest numbers: sums of magnitudes and of squares are float32, and may overflow."""

    codec: ClassVar[Levels]

    def test_zeros_and_extremes_decode_to_finite_values(self) -> None:
        for value in (0.0, -0.0, 1e-45, -1e-45, 1e18, -1e18):
            values = np.full(100, value, np.float32)
            assert np.isfinite(self.decoded(encoded(self.codec, values), 100)).all()

    @pytest.mark.parametrize("magnitude", [1e39, 1e160, 1.7e308])
    def test_float64_values_beyond_float32_decode_to_finite_values(self, magnitude: float) -> None:
        with pytest.raises(OverflowError, match="so large that"):
            encoded(self.codec, np.full(100, magnitude))

    def test_adding_is_decoding_and_adding(self) -> None:
        for n in LENGTHS:
            for dtype, of_sums in product((np.float32, np.float64), repeat=2):
                check_adding(self.codec, encoded(self.codec, gaussian(n, dtype)), n, of_sums)
        with pytest.raises(ValueError, match="damaged"):
            self.codec.add(encoded(self.codec, gaussian(1000))[:-8], np.zeros(1000, np.float32))


class TestTwoLevels(LevelsContract):
    codec = Levels(2, 64)


class TestThreeLevels(LevelsContract):
    codec = Levels(3)


class TestFourLevels(LevelsContract):
    codec = Levels()


class TestEightLevels(LevelsContract):
    codec = Levels(8, 192)


class TestSixteenLevels(LevelsContract):
    codec = Levels(16, 640)


class TestEquidistantLevels(LevelsContract):
    codec = Levels(256)


class EntropyCodedContract(LevelsContract):
    """Contract of a codec whose payloads vary in length; its sums of squares are float64."""

    @pytest.mark.parametrize("magnitude", [1e39, 1e160, 1.7e308])
    def test_float64_values_beyond_float32_decode_to_finite_values(self, magnitude: float) -> None:
        with pytest.raises((OverflowError, ValueError)):
            encoded(self.codec, np.full(100, magnitude))


class TestEntropyCoded(EntropyCodedContract):
    codec = Levels(coding="entropy")


class TestSixteenEntropyCoded(EntropyCodedContract):
    codec = Levels(16, 192, "entropy")


@pytest.mark.parametrize("levels", EVEN)
def test_entropy_coded_values_are_the_references(levels: int) -> None:
    codec = Levels(levels, 64, "entropy")
    for n in LENGTHS:
        values = gaussian(n) * np.linspace(1e-3, 10, n, dtype=np.float32)
        values[::5], values[3::7] = 0, -0.0
        np.testing.assert_array_equal(decoded(codec, values), in_levels(values, levels, 64, "entropy"))
    for magnitude in (1e-45, 1e-40, 1e-30, 1e19, 1e30, 1e38):
        values = (gaussian(200).clip(-2, 2) * np.float32(magnitude)).astype(np.float32)
        np.testing.assert_array_equal(decoded(codec, values), in_levels(values, levels, 64, "entropy"))


@pytest.mark.parametrize("levels", EVEN)
def test_entropy_coding_takes_fewer_bytes_for_the_same_error(levels: int) -> None:
    """Once scales are left out, which both have: of a Gaussian 0.14 to 0.36 bits an element, of heavier tails more."""
    rng, n = np.random.default_rng(4), 128 * 2000
    fixed, coded = Levels(levels), Levels(levels, coding="entropy")
    for values, least in ((gaussian(n), 0.12), (rng.laplace(size=n).astype(np.float32), 0.25)):
        sent = encoded(coded, values)
        bits = 8 * (fixed.nbytes(n) - coded.count_used(sent, n)) / n
        errors = [np.mean((values - decoded(one, values)) ** 2) for one in (coded, fixed)]
        assert bits > least
        assert errors[0] < 1.03 * errors[1]
    expected = coded.expected_bytes(n)
    assert coded.count_used(encoded(coded, gaussian(n)), n) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("damage", [0, 1, 5, -1])
def test_damage_to_an_entropy_coded_message_is_seen_or_decodes(damage: int) -> None:
    codec, values = Levels(coding="entropy"), gaussian(5000)
    found = encoded(codec, values)
    buckets, at = codec.buckets(5000), 2 * len(codec.buckets(5000).starts)
    found[at + damage if damage >= 0 else codec.count_used(found, 5000) - 1] ^= 0x5A
    assert not codec.spread(buckets, found, 1, 0, np.empty(5000, np.float32))
    total = np.ones(5000, np.float32)
    codec.relay(buckets, total, None, incoming=found)
    assert np.isnan(total).all()


@pytest.mark.parametrize("levels", [2, 256])
def test_levels_without_an_entropy_code_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match=r"levels must be 3, 4, 8 or 16 with coding='entropy', not"):
        Levels(levels, coding="entropy")


@every_count
@pytest.mark.parametrize("bucket", [64, 128, 320, 65536])
def test_payload_is_the_references_at_every_length(levels: int, bucket: int) -> None:
    codec = Levels(levels, bucket)
    for n in LENGTHS:
        values = gaussian(n) * np.linspace(1e-3, 10, n, dtype=np.float32)
        values[::5], values[3::7] = 0, -0.0
        found = encoded(codec, values)
        assert found.size == codec.nbytes(n)
        np.testing.assert_array_equal(found, payload(values, levels, bucket))
        np.testing.assert_array_equal(decoded(codec, values), in_levels(values, levels, bucket))


@every_count
def test_bits_of_an_element_are_those_of_the_page(levels: int) -> None:
    for bucket in (128, 256):
        n = 1000 * bucket
        codes = BITS[levels] if levels != 3 else 8 * -(-bucket // 5) / bucket
        assert 8 * Levels(levels, bucket).nbytes(n) / n == pytest.approx(codes + 16 / bucket)


@every_count
def test_random_magnitudes_are_coded_as_by_the_reference(levels: int) -> None:
    rng, codec = np.random.default_rng(levels), Levels(levels, 64)
    for _ in range(30):
        values = rng.standard_normal(700) * 10.0 ** rng.uniform(-8, 8, 700) * (rng.random(700) > 0.3)
        for dtype in (np.float32, np.float64):
            given = values.astype(dtype)
            np.testing.assert_array_equal(decoded(codec, given), in_levels(given, levels, 64))


@every_count
def test_magnitudes_at_the_ends_of_float32_are_coded_as_by_the_reference(levels: int) -> None:
    for magnitude in (1e-45, 1e-40, 1e-36, 1e-30, 1e-23, 1e-19, 1e10, 1e17, 1e18):
        values = (gaussian(200) * np.float32(magnitude)).astype(np.float32)
        np.testing.assert_array_equal(decoded(Levels(levels), values), in_levels(values, levels, 128))


@every_count
def test_values_whose_sums_overflow_are_refused_and_none_is_decoded_wrongly(levels: int) -> None:
    """Squares overflow from 2e18 on: 3 levels have no code then, others those of the lowest magnitude alone."""
    codec = Levels(levels)
    for magnitude in (2e19, 1e30, 1e36, 3e38):
        values = gaussian(128).clip(-1, 1) * np.float32(magnitude)
        scale = coded(values, levels)[0]
        if scale == 0x7FC0:
            with pytest.raises(OverflowError, match="so large that"):
                encoded(codec, values)
            with pytest.raises(OverflowError, match="so large that"):
                codec.encode_keeping(values, 0 * values, np.empty(codec.nbytes(128), np.uint8), values.copy())
        else:
            np.testing.assert_array_equal(decoded(codec, values), in_levels(values, levels, 128))
        assert (scale == 0x7FC0) == (levels == 3 or (magnitude == 3e38 and levels != 256))


def test_equidistant_levels_take_the_whole_range_of_float32() -> None:
    values = np.float32([3.3e38, -3.3e38, 1e38, 0.0])
    np.testing.assert_allclose(decoded(Levels(256), values), values, atol=3.3e38 / 127)


@every_count
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_a_bucket_that_is_not_finite_has_a_scale_of_nan(levels: int, bad: float) -> None:
    codec, values = Levels(levels, 64), gaussian(300)
    buckets, found, finite = codec.buckets(300), np.zeros(codec.nbytes(300), np.uint8), []
    for value in (values[70], bad):
        values[70] = value
        finite.append(codec.relay(buckets, values.copy(), found))
    assert finite == [True, False]
    assert [scale == 0x7FC0 for scale in found[-10:].view(np.uint16)] == [False, True, False, False, False]
    out = np.zeros(300, np.float32)
    assert not codec.spread(buckets, found, 1, 0, out)


@every_count
def test_zeros_decode_to_zeros_and_leave_nothing(levels: int) -> None:
    codec, out, left = Levels(levels), np.full(300, 7, np.float32), np.full(300, 7, np.float32)
    zeros, found = np.zeros(300, np.float32), np.empty(codec.nbytes(300), np.uint8)
    zeros[::2] = -0.0
    codec.encode_keeping(zeros, zeros, found, left)
    codec.decode(found, out, weight=1)
    assert not out.any()
    assert not left.any()


def test_codes_of_an_odd_number_of_bytes_are_followed_by_a_zero() -> None:
    for codec, n in ((Levels(3), 4), (Levels(256), 3)):
        found = encoded(codec, gaussian(n))
        codes = found.size - 2
        assert codes % 2 == 0
        assert found[codes - 1] == 0


@pytest.mark.parametrize(
    ("levels", "error"), [(2, 0.3634), (3, 0.1902), (4, 0.1175), (8, 0.03454), (16, 0.009497), (256, 2e-4)]
)
def test_error_of_normal_values_is_that_of_max(levels: int, error: float) -> None:
    """Table 1 of his article has the parts of the variance; the scale of each bucket takes off a little."""
    values = gaussian(128 * 2000)
    relative = np.mean((values - decoded(Levels(levels), values)) ** 2) / np.mean(values**2)
    assert (0.9 * error if levels < 256 else 0) < relative < error


@every_count
def test_error_is_part_of_the_vector_whatever_its_distribution(levels: int) -> None:
    """The scale is that of least squares but for its rounding, so a code never has a larger error than zero."""
    rng, codec = np.random.default_rng(3), Levels(levels)
    heavy = rng.standard_t(1.5, 128 * 500).astype(np.float32)
    sparse = np.where(rng.random(128 * 500) < 0.01, heavy, 0)
    for values in (heavy, sparse, np.abs(heavy), np.sign(heavy)):
        left = values - decoded(codec, values)
        of_buckets = [np.square(x.astype(np.float64)).reshape(-1, 128).sum(axis=1) for x in (left, values)]
        assert (of_buckets[0] <= of_buckets[1] * (1 + 2.0**-16)).all()


@every_count
def test_error_in_float64_keeps_what_float32_does_not_hold(levels: int) -> None:
    codec, values = Levels(levels), gaussian(300, np.float64)
    residual, left, found = 1e-9 * gaussian(300, np.float64, 1), np.empty(300), np.empty(codec.nbytes(300), np.uint8)
    codec.encode_keeping(values, residual, found, left)
    out = np.empty(300)
    codec.decode(found, out, weight=1)
    np.testing.assert_array_equal(left, values + residual - out)


@every_count
def test_any_bytes_are_read_and_written_inside_the_vector_alone(levels: int) -> None:
    codec, rng = Levels(levels, 64), np.random.default_rng(1)
    for n in (1, 63, 200):
        damaged = rng.integers(0, 256, codec.nbytes(n), np.uint8)
        with guarded(n, np.float32) as values:
            codec.decode(damaged, values, weight=1)


def test_a_payload_of_a_wrong_size_is_named_as_damaged() -> None:
    codec = Levels(3)
    with pytest.raises(ValueError, match="a payload of 100 elements has 22 bytes, this one 21: it is damaged"):
        codec.decode(np.zeros(21, np.uint8), np.zeros(100, np.float32), weight=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 5}, "levels must be 2 or 3 or 4 or 8 or 16 or 256, not 5"),
        ({"levels": 4.0}, "levels must be an integer, not 4.0"),
        ({"levels": True}, "levels must be an integer, not True"),
        *(({"bucket": bad}, f"bucket must be a multiple of 64 up to 65536, not {bad!r}") for bad in (0, 100, 65600)),
        *(({"bucket": bad}, f"bucket must be a multiple of 64 up to 65536, not {bad!r}") for bad in (True, "x", 64.0)),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Levels(**options)


def test_codec_is_found_by_its_name() -> None:
    assert compressor("levels") == Levels(4, 128)
    assert compressor("levels:levels=16,bucket=64") == Levels(16, 64)
    with pytest.raises(ValueError, match=r"^compressor 'levels:bucket=100': bucket must be a multiple of 64"):
        compressor("levels:bucket=100")


def test_encoding_draws_nothing() -> None:
    values = gaussian(1000)
    np.testing.assert_array_equal(encoded(Levels(), values, draw_at(1)), encoded(Levels(), values, draw_at(2, rank=5)))
