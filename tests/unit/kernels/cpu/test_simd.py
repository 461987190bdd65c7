"""Alignment of the stack for vectors that have no register."""

from __future__ import annotations

import numpy as np
from numba import njit

from mpicomp.kernels.cpu.lanes import fold
from mpicomp.kernels.cpu.simd import LANES, load


def test_functions_with_vectors_align_their_stack() -> None:
    """A vector across two pages of the stack takes a loop that spills it four times as long."""

    @njit
    def total(x):
        return fold(load(x, 0))

    assert total(np.ones(LANES, np.float32)) == LANES
    (code,) = total.inspect_llvm().values()
    assert "alignstack=64" in code
