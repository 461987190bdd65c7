"""16-bit floats on the GPU: the CPU's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.kernels.cpu import sixteen_bits as on_cpu

FLOATS = (np.float32, np.float64)
KINDS = pytest.mark.parametrize("bfloat16", [False, True], ids=["float16", "bfloat16"])
CODES = np.arange(2**16, dtype=np.uint16)


def numbers(dtype: Any) -> NDArray[Any]:
    """Numbers of both types, the ones between them and their neighbours, and what is beyond their range."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    near = np.concatenate([bits[::7] | low for low in (0x1000, 0x7FFF, 0x8000, 0x8001)]).view(np.float32)
    half = CODES[::5].view(np.float16).astype(np.float32)
    between = half + np.spacing(CODES[::5].view(np.float16)).astype(np.float32) / 2
    made = np.concatenate([near, half, between, np.nextafter(between, np.float32(0))]).astype(dtype)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 65519.99, 65520.0, np.finfo(dtype).max, 2**-25, 1e-50]
    return np.concatenate([made, np.array(special, np.float64).astype(dtype)])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS)
@KINDS
def test_rounded_numbers_are_the_cpus(to_device: Any, to_host: Any, bfloat16: bool, dtype: Any) -> None:
    from mpicomp.kernels.gpu import sixteen_bits

    with np.errstate(all="ignore"):
        values = numbers(dtype)
    finite = values[np.abs(values) < 60_000]
    for some in (values, finite, finite[:1], finite[:0], finite[:1025]):
        expected = np.empty(some.size, np.uint16)
        found = to_device(np.zeros_like(expected))
        is_finite = sixteen_bits.narrow(to_device(some), bfloat16, found).item()
        assert is_finite == on_cpu.narrow(some, bfloat16, expected) == (some is not values)
        assert to_host(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@KINDS
def test_widened_and_added_numbers_are_the_cpus(to_device: Any, to_host: Any, bfloat16: bool, dtype: Any) -> None:
    from mpicomp.kernels.gpu import sixteen_bits

    for codes in (CODES, CODES[:0], CODES[1000:1001], CODES[5000:6025]):
        expected = np.empty(codes.size, dtype)
        on_cpu.widen(codes, bfloat16, expected)
        found = to_device(np.zeros_like(expected))
        sixteen_bits.widen(to_device(codes), bfloat16, found)
        some = ~np.isnan(expected)
        assert to_host(found)[some].tobytes() == expected[some].tobytes()
        assert np.isnan(to_host(found)[~some]).all()

        sums = np.random.default_rng(1).standard_normal(codes.size).astype(dtype)
        found = to_device(sums)
        sixteen_bits.add(to_device(codes), bfloat16, found)
        on_cpu.add(codes, bfloat16, sums)
        assert to_host(found)[some].tobytes() == sums[some].tobytes()
        assert np.isnan(to_host(found)[~some]).all()
