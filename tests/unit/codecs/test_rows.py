"""Rows of few bits: sizes, two equal ends, zeros, scales, unbiasedness, damage, and refused values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs import FullRows, LevelRows, RowQuantizer, TopRows
from tests.contracts import ROW_QUANTIZERS, draw_at, gaussian
from tests.reference.statistics import assert_binomial

BASELINES = (FullRows(), FullRows("float16"), FullRows("bfloat16"))
LEVEL_ROWS = tuple(LevelRows(levels, 64) for levels in (2, 3, 4, 8, 16, 256))
COLUMNS = (1, 7, 8, 63, 64, 65, 1000)
SENDING_DELTAS = (*ROW_QUANTIZERS, *BASELINES, *LEVEL_ROWS)
EVERY = (*SENDING_DELTAS, TopRows(), TopRows(0.05, RowQuantizer(2, "stochastic")), TopRows(1.0))


def payload_of(codec: Any, values: NDArray[Any], step: int = 3, keys: Any = None) -> NDArray[np.uint8]:
    payload = np.full(codec.nbytes(values.size // values.shape[-1], values.shape[-1]), 0xA5, np.uint8)
    codec.encode(values, payload, draw_at(step), keys)
    return payload


def round_trip(codec: Any, values: NDArray[Any], step: int = 3) -> NDArray[np.float32]:
    found = np.full_like(values, 77)
    codec.decode(payload_of(codec, values, step), found)
    return found


@pytest.mark.parametrize("codec", SENDING_DELTAS, ids=str)
def test_two_ends_of_a_link_stay_equal_to_the_bit(codec: Any) -> None:
    for columns in COLUMNS:
        sender = gaussian(5 * columns).reshape(5, columns)
        receiver = sender.copy()
        for visit in range(4):
            values = gaussian(5 * columns, seed=visit + 1).reshape(5, columns) * np.float32(0.5**visit)
            before, payload = values.copy(), np.empty(codec.nbytes(5, columns), np.uint8)
            codec.encode_delta(values, sender, payload, draw_at(visit))
            codec.decode_delta(payload, receiver)
            assert sender.tobytes() == receiver.tobytes()
            assert values.tobytes() == before.tobytes()


def test_deltas_bring_a_message_ever_nearer() -> None:
    values, message = gaussian(4096).reshape(4, 1024), np.zeros((4, 1024), np.float32)
    codec = RowQuantizer(2)
    payload = np.empty(codec.nbytes(4, 1024), np.uint8)
    for _ in range(12):
        codec.encode_delta(values, message, payload)
    assert np.linalg.norm(values - message) < 1e-3 * np.linalg.norm(values)


@pytest.mark.parametrize(("bits", "most"), [(1, 0.61), (2, 0.45), (3, 0.225), (4, 0.113), (6, 0.0285), (8, 0.0071)])
def test_error_of_normal_rows_is_that_of_centres(bits: int, most: float) -> None:
    values = gaussian(256_000).reshape(1000, 256)
    error = np.linalg.norm(round_trip(RowQuantizer(bits), values) - values) / np.linalg.norm(values)
    assert 0.97 * most < error < most


def test_one_bit_is_the_mean_magnitude_times_the_sign() -> None:
    values = np.array([[0.5, 1.5, 0.0, 2.0], [-1, -2, -3, -2]], np.float32)
    assert round_trip(RowQuantizer(1), values).tolist() == [[1, 1, 1, 1], [-2, -2, -2, -2]]


def test_sizes_are_the_formulas() -> None:
    for columns in COLUMNS:
        for codec in ROW_QUANTIZERS:
            assert codec.nbytes(3, columns) == 3 * (int(codec.scale[-2:]) // 8 + -(-codec.bits * columns // 8))
    assert FullRows().nbytes(3, 7) == 84
    assert FullRows("bfloat16").nbytes(3, 7) == 42
    assert TopRows(0.2).nbytes(3, 1001) == 3 * (2 + 201 + 126)
    assert [TopRows(0.1).kept(columns) for columns in (1, 10, 11, 1000)] == [1, 1, 2, 100]


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_zeros_decode_to_exactly_zero(codec: Any) -> None:
    for columns in (7, 200):
        values = gaussian(3 * columns).reshape(3, columns)
        values[1] = 0
        found = round_trip(codec, values)
        assert not found[1].any()
        assert not np.signbit(found[1]).any()
        assert found[0].any()


def test_a_row_that_has_not_changed_leaves_the_message_alone() -> None:
    values = gaussian(100).reshape(1, 100)
    values[0, ::2] = -0.0
    message = values.copy()
    for codec in ROW_QUANTIZERS:
        payload = np.empty(codec.nbytes(1, 100), np.uint8)
        codec.encode_delta(values, message, payload, draw_at())
        assert message.tobytes() == values.tobytes()


@pytest.mark.parametrize("codec", [c for c in ROW_QUANTIZERS if c.rounding == "stochastic"], ids=str)
def test_drawn_levels_have_the_value_as_their_mean(codec: RowQuantizer) -> None:
    row, most, steps = np.array([1.0, -1.0, 0.3, -0.77, 0.0, 1e-3, 0.123, -0.5], np.float32), 2**codec.bits - 1, 4000
    values = np.tile(row, (steps, 1))
    codes = np.rint((round_trip(codec, values).astype(np.float64) + 1) * most / 2)
    place = (row.astype(np.float64) + 1) * most / 2
    ups = codes - np.floor(place)
    assert ((ups == 0) | (ups == 1)).all()
    for i in range(row.size):
        assert_binomial(int(ups[:, i].sum()), steps, float(place[i] - np.floor(place[i])), f"element {i}")


def test_tiny_rows_stay_unbiased_where_levels_are_drawn() -> None:
    codec, steps = RowQuantizer(2, "stochastic"), 4000
    values = np.full((steps, 1), 1e-8, np.float32)
    ups = np.rint((round_trip(codec, values).astype(np.float64) * 2.0**24 + 1) * 1.5) - 1
    assert_binomial(int(ups.sum()), steps, (1e-8 * 2**24 + 1) * 1.5 - 1)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("scale", "least"), [("float16", 2.0**-24), ("float32", 2.0**-100)])
def test_tiny_rows_err_by_half_the_smallest_scale_at_most(bits: int, scale: Any, least: float) -> None:
    for part in (0.01, 0.49, 0.51, 0.99, 1.01):
        values = np.full((1, 70), part * least, np.float32)
        error = np.abs(round_trip(RowQuantizer(bits, scale=scale), values) - values).max()
        assert error <= 0.5 * least


def test_float16_scales_reach_to_65504_and_beyond_that_float32_is_named() -> None:
    values = np.full((3, 20), 65504, np.float32)
    for codec in ROW_QUANTIZERS:
        assert np.isfinite(round_trip(codec, values)).all()
    values[2] = 65600
    for codec in ROW_QUANTIZERS:
        if codec.scale == "float32":
            assert np.isfinite(round_trip(codec, values)).all()
        else:
            with pytest.raises(OverflowError, match=r"row 2 is too large for a float16 scale.*scale='float32'"):
                payload_of(codec, values)
    with pytest.raises(OverflowError, match="dtype='float32'"):
        payload_of(FullRows("float16"), values)


def test_float16_scales_are_no_smaller_than_the_row() -> None:
    for size in (1.0001, 3.3333, 60001.7, 1.23e-6):
        values = np.full((1, 1), size, np.float32)
        for bits in range(2, 9):
            scale = payload_of(RowQuantizer(bits, "stochastic"), values)[:2].view(np.float16)[0]
            assert float(np.nextafter(scale, np.float16(0))) < values[0, 0] <= float(scale)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e38, 3.4e38])
def test_extremes_of_float32_decode_to_finite_values(magnitude: float) -> None:
    values = np.full((2, 70), magnitude, np.float32)
    for codec in (*(c for c in ROW_QUANTIZERS if c.scale == "float32"), FullRows()):
        assert np.isfinite(round_trip(codec, values)).all()


def test_words_of_a_row_depend_on_its_key_and_not_on_its_batch() -> None:
    codec, values = RowQuantizer(3, "stochastic", "float32"), gaussian(6 * 700).reshape(6, 700)
    keys = np.array([9, 2, 700, 3, 2**30, 0])
    whole = np.empty_like(values)
    codec.decode(payload_of(codec, values, keys=keys), whole)
    order = np.array([4, 0, 2])
    part = np.empty((3, 700), np.float32)
    codec.decode(payload_of(codec, values[order], keys=keys[order]), part)
    np.testing.assert_array_equal(part, whole[order])


def test_rows_of_other_keys_and_steps_draw_other_words() -> None:
    codec, values = RowQuantizer(2, "stochastic"), np.full((2, 600), 0.1, np.float32)
    values[:, 0] = 1
    first, second = round_trip(codec, values)
    assert (first != second).mean() > 0.2
    assert (first != round_trip(codec, values, step=4)[0]).mean() > 0.2
    assert (first[:88] != first[512:]).mean() > 0.2


@pytest.mark.parametrize("codec", EVERY, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(codec: Any, bad: float) -> None:
    for place in (0, 70, 99):
        values = gaussian(300).reshape(3, 100)
        values[1, place] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            payload_of(codec, values)


@pytest.mark.parametrize("codec", SENDING_DELTAS, ids=str)
def test_a_refused_delta_leaves_the_message_as_it_was(codec: Any) -> None:
    values, message = gaussian(300).reshape(3, 100), gaussian(300, seed=1).reshape(3, 100)
    before, payload = message.tobytes(), np.empty(codec.nbytes(3, 100), np.uint8)
    values[2, 50] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        codec.encode_delta(values, message, payload, draw_at())
    assert message.tobytes() == before


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_payload_of_a_wrong_size_is_refused(codec: Any) -> None:
    values = gaussian(200).reshape(2, 100)
    payload = payload_of(codec, values)
    for wrong in (payload[:-1], payload[:0], np.concatenate([payload, payload[:1]])):
        with pytest.raises(ValueError, match="damaged"):
            codec.decode(wrong, values.copy())
        with pytest.raises(ValueError, match="damaged"):
            codec.encode(values, wrong, draw_at())


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_damaged_payloads_decode_to_finite_values(codec: Any) -> None:
    payload, found = payload_of(codec, gaussian(140).reshape(2, 70)), np.empty((2, 70), np.float32)
    for bit in range(0, 8 * payload.size, 1 if payload.size < 200 else 7):
        damaged = payload.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        codec.decode(damaged, found)
        assert np.isfinite(found).all()
    random = np.random.default_rng(5)
    for _ in range(50):
        codec.decode(random.integers(0, 256, payload.size, np.uint8), found)
        assert np.isfinite(found).all()


def test_top_rows_keep_the_largest_and_nothing_else() -> None:
    for columns in COLUMNS:
        values = gaussian(4 * columns).reshape(4, columns)
        keep = -(-columns // 5)
        found = round_trip(TopRows(0.2, RowQuantizer(8, scale="float32")), values)
        for row, got in zip(values, found, strict=True):
            order = np.sort(np.argsort(-np.abs(row), kind="stable")[:keep])
            assert np.flatnonzero(got).tolist() == order.tolist()
            assert np.abs(got - row)[order].max() <= np.abs(row).max() / 255


@pytest.mark.parametrize("codec", BASELINES, ids=str)
def test_baselines_round_and_do_nothing_else(codec: FullRows) -> None:
    values = gaussian(210).reshape(3, 70)
    found = round_trip(codec, values)
    rounding = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[codec.dtype]
    assert (np.abs(found - values) <= rounding * np.abs(values) + 1e-7 * (rounding > 0)).all()


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_a_payload_may_begin_at_any_byte(codec: Any) -> None:
    values = gaussian(210).reshape(3, 70)
    want, found = payload_of(codec, values), np.empty_like(values)
    payload = np.empty(want.size + 1, np.uint8)[1:]
    codec.encode(values, payload, draw_at())
    np.testing.assert_array_equal(payload, want)
    codec.decode(payload, found)
    np.testing.assert_array_equal(found, round_trip(codec, values))


def test_no_rows_take_no_bytes() -> None:
    for codec in EVERY:
        assert round_trip(codec, np.empty((0, 5), np.float32)).shape == (0, 5)


class TestWhatIsRefused:
    @pytest.mark.parametrize("options", [{"bits": 0}, {"bits": 9}, {"rounding": "up"}, {"scale": "float64"}])
    def test_options_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            RowQuantizer(**options)

    def test_drawn_signs(self) -> None:
        with pytest.raises(
            ValueError, match=r"bits must be 2 or more with rounding='stochastic'.*use rounding='nearest'"
        ):
            RowQuantizer(1, "stochastic")

    def test_other_baselines_and_fractions(self) -> None:
        with pytest.raises(ValueError, match="dtype must be"):
            FullRows("float64")
        for fraction in (0, 1.1, np.nan):
            with pytest.raises(ValueError, match="fraction must be"):
                TopRows(fraction)

    @pytest.mark.parametrize(
        "keys", [np.arange(2), np.array([0, 1, -1]), np.array([0, 1, 2**54]), np.zeros(3, np.int32)]
    )
    def test_row_keys_that_do_not_fit(self, keys: Any) -> None:
        with pytest.raises(ValueError, match="row_keys must"):
            payload_of(RowQuantizer(2, "stochastic"), gaussian(30).reshape(3, 10), keys=keys)

    def test_stochastic_rounding_without_a_draw(self) -> None:
        codec = RowQuantizer(2, "stochastic")
        with pytest.raises(ValueError, match="pass draw="):
            codec.encode(np.ones((1, 4), np.float32), np.empty(codec.nbytes(1, 4), np.uint8))

    @pytest.mark.parametrize(
        "values", [np.ones((2, 4)), np.ones((4, 4), np.float32)[:, ::2], np.ones((2, 0), np.float32)]
    )
    def test_arrays_that_are_no_rows(self, values: Any) -> None:
        for codec in (RowQuantizer(), FullRows(), TopRows(), LevelRows()):
            with pytest.raises(ValueError, match="must be C-contiguous float32 rows"):
                codec.encode(values, np.empty(100, np.uint8))

    def test_a_message_of_another_shape_or_the_values_themselves(self) -> None:
        values = np.ones((2, 4), np.float32)
        for codec in (RowQuantizer(), LevelRows()):
            payload = np.empty(codec.nbytes(2, 4), np.uint8)
            with pytest.raises(ValueError, match="shape"):
                codec.encode_delta(values, np.ones((4, 2), np.float32), payload)
            with pytest.raises(ValueError, match="share memory"):
                codec.encode_delta(values, values, payload)
