"""Signs on the GPU: the CPU's bits, residuals and sums, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.kernels.cpu import sign as on_cpu
from tests.unit.kernels.gpu.side_by_side import assert_same, words

LENGTHS = (0, 1, 63, 64, 65, 1000, 4096 + 130)  # Triton's interpreter takes its time
FLOATS = (np.float32, np.float64)
MODES = ("plain", "own", "paper")


def numbers(n: int, dtype: Any, seed: int = 0) -> NDArray[Any]:
    """Numbers of all sizes, subnormal ones among them, and zeros of both signs."""
    rng = np.random.default_rng([n, seed])
    tiny = float(np.finfo(dtype).smallest_subnormal)
    made = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)
    special = rng.choice([0.0, -0.0, tiny, -tiny, 5 * tiny], n)
    return np.where(rng.random(n) < 0.3, special, made).astype(dtype)


class Both:
    """`encode` on the CPU and on the device, with copies of the same input."""

    def __init__(self, to_device: Any, to_host: Any) -> None:
        self.to_device, self.to_host = to_device, to_host

    def encode(
        self, mode: str, u: Any, residual: Any, odd: bool = True, whole: Any = None, step: Any = 0.75,
        limit: float = 0.5, previous: float = 0.3, offset: int = 1,
    ) -> tuple[NDArray[np.uint64], NDArray[np.float64], int]:  # fmt: skip
        """Fail unless everything that is written is the same; returns the CPU's bits, sums and clipped elements."""
        from tests.unit.kernels.gpu import whole_vectors

        kind, n = u.dtype.type, u.size
        residual = None if mode == "plain" else residual.copy()
        bits, sums = words(n if residual is None else residual.size), np.full(-(-n // 4096), np.nan)
        scalars = [kind(step), kind(limit), kind(previous) if mode == "paper" else None, odd]
        scalars += [kind(0), np.nextafter(kind(0), kind(1))]
        is_apart = residual is not None and n % 2 == 0
        left = np.full_like(residual, np.nan) if is_apart else residual
        arrays = [u, whole, residual, left, bits, sums]
        on_device = [None if array is None else self.to_device(array, offset) for array in arrays]
        if not is_apart:
            on_device[3] = on_device[2]
        found = whole_vectors.encode(*on_device[:5], *scalars, on_device[5])
        clipped = on_cpu.encode(*arrays[:5], *scalars, sums)
        what = mode, kind, n, odd
        for tensor, array in zip(on_device, arrays, strict=True):
            if array is not None:
                host = self.to_host(tensor)
                assert_same(host.view(np.uint64) if array is bits else host, array, what)
        assert found.item() == clipped, what
        return bits, sums, clipped


@pytest.fixture
def both(to_device: Any, to_host: Any) -> Both:
    """Give what encodes on both devices and compares."""
    return Both(to_device, to_host)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
def test_encoding_is_the_cpus(both: Both, mode: str, dtype: Any) -> None:
    for n in LENGTHS:
        clipped = both.encode(mode, numbers(n, dtype), numbers(n, dtype, 1), odd=n % 2 == 0, offset=n % 4)[2]
        assert mode != "own" or n < 64 or clipped > 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["own", "paper"])
def test_encoding_a_difference_is_the_cpus(both: Both, mode: str, dtype: Any) -> None:
    for n, padding in ((1, 0), (1, 63), (64, 0), (100, 0), (100, 28), (4096 + 65, 63)):
        both.encode(mode, numbers(n, dtype), numbers(n + padding, dtype, 1), whole=numbers(n, dtype, 2))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_is_encoded_as_on_the_cpu(both: Both, mode: str) -> None:
    """In a whole word, where NaN counts as clipped, and behind the last one, where it does not."""
    for bad in (np.nan, np.inf, -np.inf):
        for position in (0, 63, 64, 66):
            u = numbers(67, np.float32)
            u[position] = bad
            assert not np.isfinite(both.encode(mode, u, numbers(67, np.float32, 1))[1])


@pytest.mark.parametrize("position", [5, 64, 66])
def test_sums_show_where_the_compensated_vector_overflows(both: Both, position: int) -> None:
    u, residual = numbers(67, np.float32), numbers(67, np.float32, 1)
    residual[position] = u[position] = 2e38
    assert not np.isfinite(both.encode("paper", u, residual)[1]).any()


@pytest.mark.parametrize("mode", ["own", "paper"])
def test_steps_and_limits_of_zero_keep_the_cpus_zeros(both: Both, mode: str) -> None:
    u, residual = np.zeros(200, np.float32), np.zeros(200, np.float32)
    u[::3], residual[::2], u[1::7] = -0.0, -0.0, -1
    both.encode(mode, u, residual, step=0.0, limit=0.0, previous=0.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_packed_signs_are_the_cpus(to_device: Any, to_host: Any, dtype: Any) -> None:
    from mpicomp.kernels.gpu import sign

    zero, tiny = dtype(0), np.nextafter(dtype(0), dtype(1))
    for n in LENGTHS:
        for odd_positive in (False, True):
            x, bits = numbers(n, dtype), np.empty(-(-n // 64), np.uint64)
            found = to_device(bits)
            assert sign.pack(to_device(x, n % 4), found, odd_positive, zero, tiny).item()
            on_cpu.pack(x, bits, odd_positive, zero, tiny)
            assert_same(to_host(found).view(np.uint64), bits, n)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_found(to_device: Any, dtype: Any) -> None:
    from mpicomp.kernels.gpu import sign

    bits = to_device(np.empty(33, np.uint64))
    for position in (0, 63, 64, 1023, 1024, 2100):
        for bad in (np.nan, np.inf, -np.inf):
            x = numbers(2101, dtype)
            x[-1] = np.finfo(dtype).max
            assert sign.all_finite(to_device(x)).item()
            x[position] = bad
            assert not sign.all_finite(to_device(x)).item()
            assert not sign.pack(to_device(x), bits, False, dtype(0), dtype(1)).item()


@pytest.mark.parametrize("exponent", [0x7C00, 0x7F80])
def test_nan_and_infinity_of_16_bits_are_found(to_device: Any, exponent: int) -> None:
    from mpicomp.kernels.gpu import sign

    codes = np.arange(2**16, dtype=np.uint16)
    finite = codes[(codes & exponent) != exponent]
    assert sign.all_finite_16(to_device(finite), np.uint16(exponent)).item()
    assert sign.all_finite_16(to_device(finite[:0]), np.uint16(exponent)).item()
    for bad in (exponent, exponent | 0x8000, 0xFFFF):
        for position in (0, 1023, 1500):
            some = finite[:1501].copy()
            some[position] = bad
            assert not sign.all_finite_16(to_device(some), np.uint16(exponent)).item()


@pytest.mark.parametrize("width", [np.uint16, np.uint32, np.uint64])
def test_unpacked_signs_are_the_cpus(to_device: Any, to_host: Any, width: Any) -> None:
    from mpicomp.kernels.gpu import sign

    positive, negative = width(40_000), np.array(-3).astype(width)[()]
    for n in LENGTHS:
        bits, expected = words(n), np.empty(n, width)
        on_cpu.unpack(bits, positive, negative, False, expected)
        found = to_device(np.zeros_like(expected))
        sign.unpack(to_device(bits), positive, negative, True, found)
        assert_same(to_host(found), expected, n)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
def test_full_precision_input_is_the_cpus(to_device: Any, to_host: Any, mode: str, dtype: Any) -> None:
    from tests.unit.kernels.gpu import whole_vectors

    previous = dtype(0.3) if mode == "paper" else None
    for n in LENGTHS:
        u, residual = numbers(n, dtype), None if mode == "plain" else numbers(n, dtype, 1)
        bits, sums = words(n), np.full(-(-n // 4096), np.nan)
        u_there, sums_there = to_device(u, n % 4), to_device(sums)
        residual_there = None if residual is None else to_device(residual)
        out, out_there = (None, None) if mode == "plain" else (u, u_there)  # in place
        left, left_there = residual, residual_there
        if residual is not None and n % 2:
            left = np.full_like(residual, np.nan)
            left_there = to_device(left)
        terms = to_device(bits), previous, out_there, sums_there
        whole_vectors.add_and_clear(u_there, residual_there, left_there, *terms)
        on_cpu.add_and_clear(u, residual, left, bits, previous, out, sums)
        assert_same(to_host(u_there), u, n)
        assert_same(to_host(sums_there), sums, n)
        if residual is not None:
            assert_same(to_host(residual_there), residual, n)
            assert_same(to_host(left_there), left, n)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_result_taken_off_leaves_what_it_does_on_the_cpu(to_device: Any, to_host: Any, dtype: Any) -> None:
    from tests.unit.kernels.gpu import whole_vectors

    for n in LENGTHS:
        for step in (dtype(0.75), dtype(0)):
            x, bits = numbers(n, dtype), words(n)
            found = to_device(x)
            whole_vectors.subtract_result(found, to_device(bits), step)
            on_cpu.subtract_result(x, bits, step)
            assert_same(to_host(found), x, n)
