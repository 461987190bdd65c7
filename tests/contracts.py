"""Promises of every codec, as tests: a codec's own test file subclasses `CodecContract` and names the codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs import Codec, Draw, RowQuantizer
from mpicomp.codecs.base import AveragingCodec, FeedbackCodec
from mpicomp.kernels.streams import Stream
from tests.reference import compressors

LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 1000, 4095, 4096, 4097)
GUARD = 0xA5
ROW_QUANTIZERS = tuple(
    RowQuantizer(bits, rounding, scale)
    for bits in range(1, 9)
    for rounding in ("nearest", "stochastic")
    for scale in ("float16", "float32")
    if bits > 1 or rounding == "nearest"
)


def draw_at(step: int = 3, rank: int = 1, ordinal: int = 0, offset: int = 0, *, seed: int = 11) -> Draw:
    """A place in a stream of the tests' own."""
    return Draw(Stream(seed, 0, "test"), step, rank, ordinal, offset)


def gaussian(n: int, dtype: Any = np.float32, seed: int = 0) -> NDArray[Any]:
    """Return `n` normally distributed values other than zero."""
    return np.random.default_rng((seed, n)).standard_normal(n).astype(dtype)


def encoded(codec: Codec, values: NDArray[Any], draw: Draw | None = None) -> NDArray[np.uint8]:
    """The payload of one rank's values."""
    payload = np.full(codec.nbytes(values.size), GUARD, np.uint8)
    codec.encode(values, payload, draw=draw or draw_at())
    return payload


@contextmanager
def guarded(n: int, dtype: Any, offset: int = 0) -> Iterator[NDArray[Any]]:
    """`n` elements, `offset` of them behind a multiple of 32 bytes, amid memory that must stay as it is."""
    memory = np.full(n + 128, 77, dtype)
    start = -memory.ctypes.data % 32 // memory.itemsize + 32 + offset
    try:
        yield memory[start : start + n]
    finally:
        assert (memory[:start] == 77).all()
        assert (memory[start + n :] == 77).all()


def check_several_at_once(codec: Codec, n: int, dtype: Any) -> None:
    """Check that passes which do several steps at once, where a codec has them, give the bits of the single steps."""
    values, residual = np.random.default_rng(n).standard_normal((2, n)).astype(dtype)
    values[::5], values[n // 3 : n // 2] = -residual[::5], 0  # zeros of the sum, and of the values
    p, payload = values + residual, np.full(codec.nbytes(n), GUARD, np.uint8)
    decoded, told, found = np.full(n, 77, dtype), np.full(n, 77, dtype), payload.copy()
    codec.encode(p, payload, draw=draw_at())
    codec.decode(payload, decoded, weight=1)
    if isinstance(codec, FeedbackCodec):
        if codec.fuses == "sent":
            codec.encode_telling(p, found, told, draw=draw_at())
        else:
            codec.encode_keeping(values, residual, found, told)
        np.testing.assert_array_equal(found, payload)
        assert told.tobytes() == (decoded if codec.fuses == "sent" else p - decoded).tobytes()
    if isinstance(codec, AveragingCodec):
        check_adding(codec, payload, n, dtype)


def check_adding(codec: AveragingCodec, payload: NDArray[np.uint8], n: int, dtype: Any) -> None:
    """Check that adding a payload to sums gives the bits of decoding it and adding that."""
    sums, decoded = gaussian(n, dtype, seed=3), np.full(n, 77, dtype)
    codec.decode(payload, decoded, weight=1)
    with np.errstate(over="ignore"):
        expected = sums + decoded
    codec.add(payload, sums)
    np.testing.assert_array_equal(sums, expected)


class CodecContract(ABC):
    """Subclass as ``TestX`` with `codec` and `check_round_trip`.

    Attributes
    ----------
    codec : Codec
    dtypes : tuple
        Of the values it takes.
    """

    codec: ClassVar[Codec]
    dtypes: ClassVar[tuple[type, ...]] = (np.float32,)

    @abstractmethod
    def check_round_trip(self, values: NDArray[Any], decoded: NDArray[Any]) -> None:
        """Assert that `decoded` is one of the results that encoding `values` may have."""

    def decoded(self, payload: NDArray[np.uint8], n: int, dtype: Any = np.float32) -> NDArray[Any]:
        values = np.full(n, 77, dtype)
        self.codec.decode(payload, values, weight=1)
        return values

    def test_round_trip_at_every_length(self) -> None:
        for n in LENGTHS:
            for dtype in self.dtypes:
                values = gaussian(n, dtype)
                before = values.copy()
                decoded = self.decoded(encoded(self.codec, values), n, dtype)
                np.testing.assert_array_equal(values, before)
                self.check_round_trip(values, decoded)

    def test_payload_is_written_whole_and_nothing_else(self) -> None:
        for n in LENGTHS:
            size = self.codec.nbytes(n)
            payloads = []
            for filler in (GUARD, 0):
                with guarded(size, np.uint8, 8) as payload:
                    payload[:] = filler
                    self.codec.encode(gaussian(n), payload, draw=draw_at())
                payloads.append(payload)
            np.testing.assert_array_equal(*payloads)

    def test_zeros_and_extremes_decode_to_finite_values(self) -> None:
        for value in (0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38):
            values = np.full(100, value, np.float32)
            assert np.isfinite(self.decoded(encoded(self.codec, values), 100)).all()

    @pytest.mark.parametrize("magnitude", [1e39, 1e160, 1.7e308])
    def test_float64_values_beyond_float32_decode_to_finite_values(self, magnitude: float) -> None:
        if np.float64 in self.dtypes:
            for values in (np.full(100, magnitude), magnitude * (gaussian(100, np.float64) / 4)):
                payload = encoded(self.codec, values)
                for dtype in (np.float32, np.float64):
                    decoded = self.decoded(payload, 100, dtype)
                    assert np.isfinite(decoded).all()
                    assert (decoded * np.sign(values) >= 0).all()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_are_refused(self, bad: float) -> None:
        for position in (0, 70, 99):
            values = gaussian(100)
            values[position] = bad
            with pytest.raises(ValueError, match="NaN or infinity"):
                encoded(self.codec, values)

    def test_payload_of_a_wrong_size_is_refused(self) -> None:
        for n in LENGTHS:
            payload = encoded(self.codec, gaussian(n))
            longer = np.concatenate([payload, np.zeros(8, np.uint8)])
            for wrong in (*(payload[:-cut] for cut in (1, 4, 8, payload.size) if payload.size >= cut > 0), longer):
                with pytest.raises(ValueError, match="damaged"):
                    self.decoded(wrong, n)
                with pytest.raises(ValueError, match="damaged"):
                    self.codec.encode(gaussian(n), wrong, draw=draw_at())

    def test_flipped_bits_give_an_error_or_finite_values(self) -> None:
        n = 130
        payload = encoded(self.codec, gaussian(n))
        for bit in range(8 * payload.size):
            damaged = payload.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            self._decodes_or_refuses(damaged, n)

    def test_any_bytes_give_an_error_or_finite_values(self) -> None:
        n = 130
        rng = np.random.default_rng(5)
        for _ in range(200):
            self._decodes_or_refuses(rng.integers(0, 256, self.codec.nbytes(n), np.uint8), n)

    def _decodes_or_refuses(self, payload: NDArray[np.uint8], n: int) -> None:
        try:
            decoded = self.decoded(payload, n)
        except ValueError:
            return
        assert np.isfinite(decoded).all()

    def test_payload_does_not_depend_on_where_the_values_lie(self) -> None:
        for n in LENGTHS:
            for dtype in self.dtypes:
                values = gaussian(n, dtype)
                want = encoded(self.codec, values)
                for offset in (1, 2, 3):
                    moved = np.empty(n + offset, dtype)[offset:]
                    moved[:] = values
                    np.testing.assert_array_equal(encoded(self.codec, moved), want)

    def test_several_steps_at_once_give_the_bits_of_single_steps(self) -> None:
        for n in LENGTHS:
            for dtype in self.dtypes:
                check_several_at_once(self.codec, n, dtype)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
    def test_several_steps_at_once_refuse_a_sum_that_is_not_finite(self, bad: float) -> None:
        codec, payload = self.codec, np.empty(self.codec.nbytes(260), np.uint8)
        for position in (0, 150, 259):
            values, residual, out = np.ones((3, 260), np.float32)
            values[position] = residual[position] = bad
            if not isinstance(codec, FeedbackCodec):
                continue
            if codec.fuses != "sent":
                with pytest.raises(ValueError, match="NaN or infinity"):
                    codec.encode_keeping(values, residual, payload, out)
            elif not np.isfinite(bad):
                with pytest.raises(ValueError, match="NaN or infinity"):
                    codec.encode_telling(values, payload, out, draw=draw_at())

    def test_adding_is_decoding_and_adding(self) -> None:
        if isinstance(self.codec, AveragingCodec):
            for n, dtype, magnitude in product(LENGTHS, self.dtypes, (1, 1e300)):
                most = np.finfo(dtype).max
                values = np.clip(gaussian(n, np.float64) * magnitude, -most, most).astype(dtype)
                for of_sums in (np.float32, np.float64):
                    check_adding(self.codec, encoded(self.codec, values), n, of_sums)
            with pytest.raises(ValueError, match="damaged"):
                self.codec.add(encoded(self.codec, gaussian(1000))[:-8], np.zeros(1000, np.float32))


class SignContract(CodecContract):
    """Contract of codecs whose payload of one rank decodes to the signs."""

    dtypes = (np.float32, np.float64)

    def check_round_trip(self, values: NDArray[Any], decoded: NDArray[Any]) -> None:
        np.testing.assert_array_equal(decoded, np.where(values > 0, 1, -1))


class CompressorContract(CodecContract):
    """Contract of the codecs that methods with error feedback take: decoded values are those of the definition."""

    dtypes = (np.float32, np.float64)

    def check_round_trip(self, values: NDArray[Any], decoded: NDArray[Any]) -> None:
        np.testing.assert_array_equal(decoded, compressors.decoded(self.codec, values, draw_at()))
