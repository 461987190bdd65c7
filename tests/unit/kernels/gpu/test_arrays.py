"""Error feedback of whole arrays on the GPU: the CPU's bits, and whether they are finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.cpu import arrays as on_cpu

FLOATS = (np.float32, np.float64)
LENGTHS = (0, 1, 9, 513, 4097)


def some_arrays(n: int, dtype: Any, count: int) -> list[Any]:
    """Numbers of all sizes, zeros of both signs and subnormal numbers, from an odd element of a longer array on."""
    rng = np.random.default_rng(n)
    made = rng.standard_normal((count, n + 1)) * 10.0 ** rng.integers(-30, 30, (count, n + 1))
    tiny = float(np.finfo(dtype).smallest_subnormal)
    special = rng.choice([0.0, -0.0, 3 * tiny, -tiny], made.shape)
    return list(np.where(rng.random(made.shape) < 0.2, special, made).astype(dtype)[:, 1:])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("alpha", [None, 0.9, -1e-3])
def test_what_is_compensated_has_the_bits_of_the_cpus(
    to_device: Any, to_host: Any, dtype: Any, alpha: float | None
) -> None:
    from mpicomp.kernels.gpu import arrays as on_gpu

    scale = None if alpha is None else dtype(alpha)
    for n in LENGTHS:
        values, residual, expected = some_arrays(n, dtype, 3)
        found = to_device(expected.copy())
        on_cpu.compensate(values, residual, scale, expected)
        on_gpu.compensate(to_device(values), to_device(residual), scale, found)
        assert to_host(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beta", [None, 0.9, -1e-3])
def test_what_is_kept_has_the_bits_of_the_cpus(to_device: Any, to_host: Any, dtype: Any, beta: float | None) -> None:
    from mpicomp.kernels.gpu import arrays as on_gpu

    scale = None if beta is None else dtype(beta)
    for n in LENGTHS:
        values, sent, residual, expected = some_arrays(n, dtype, 4)
        found = to_device(expected.copy())
        assert on_cpu.keep(values, sent, residual, scale, expected)
        assert on_gpu.keep(to_device(values), to_device(sent), to_device(residual), scale, found).item()
        assert to_host(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_kept_and_not_finite_is_noticed_wherever_it_is(to_device: Any, to_host: Any, dtype: Any) -> None:
    from mpicomp.kernels.gpu import arrays as on_gpu

    for position in (0, 1023, 1024, 1040):
        for bad in (np.nan, np.inf, -np.inf):
            values, sent, residual, expected = np.ones((4, 1041), dtype)
            values[position] = bad
            found = to_device(expected.copy())
            assert not on_cpu.keep(values, sent, residual, dtype(2), expected)
            finite = on_gpu.keep(to_device(values), to_device(sent), to_device(residual), dtype(2), found)
            assert finite.shape == ()
            assert not finite.item()
            np.testing.assert_array_equal(to_host(found), expected)
