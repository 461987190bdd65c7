"""One call of a kernel on the CPU and on the device, from copies of the same arrays."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.interpreter import replace_language_once

replace_language_once()
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def numbers(n: int, dtype: Any, seed: int = 0) -> NDArray[Any]:
    """Numbers of all sizes, subnormal ones among them, and zeros of both signs."""
    rng = np.random.default_rng([n, seed])
    tiny = float(np.finfo(dtype).smallest_subnormal)
    made = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)
    return np.where(rng.random(n) < 0.2, rng.choice([0.0, -0.0, tiny, -tiny], n), made).astype(dtype)


def words(n: int, seed: int = 0) -> NDArray[np.uint64]:
    """Bits of n elements, and bits behind them."""
    return np.random.default_rng([n, seed]).integers(0, 2**64, -(-n // 64), np.uint64)


def assert_same(found: NDArray[Any], expected: NDArray[Any], what: object) -> None:
    """Fail unless bits are equal, but for those of NaN."""
    if expected.dtype.kind == "f":
        there = ~np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), ~there, str(what))
        found, expected = found[there], expected[there]
    assert found.tobytes() == expected.tobytes(), what


class SideBySide:
    """Calls kernels of one family.

    Parameters
    ----------
    family : str
    to_device, to_host : functions
        The fixtures.
    """

    def __init__(self, family: str, to_device: Any, to_host: Any) -> None:
        self.cpu = import_module(f"mpicomp.kernels.cpu.{family}")
        self.gpu = import_module(f"mpicomp.kernels.gpu.{family}")
        self._to_device, self._to_host = to_device, to_host

    def __call__(self, name: str, *arguments: Any, host: tuple[int, ...] = (), offset: int = 1) -> list[Any]:
        """Fail unless every array, and what is returned, is the same afterwards; returns the CPU's arguments.

        host : places of arrays that the device's kernel takes in host memory, or does not use; they are not compared.
        offset : elements that the device's arrays are off any alignment.
        """
        theirs = [
            self._to_device(a, offset) if isinstance(a, np.ndarray) and i not in host else copy.copy(a)
            for i, a in enumerate(arguments)
        ]
        ours = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        with np.errstate(all="ignore"):
            returned, expected = getattr(self.gpu, name)(*theirs), getattr(self.cpu, name)(*ours)
        for i, array in enumerate(ours):
            if isinstance(array, np.ndarray) and i not in host:
                assert_same(self._to_host(theirs[i]).view(array.dtype), array, (name, i))
        assert expected is None or returned.item() == expected, name
        return ours
