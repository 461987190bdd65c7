"""Cascading compression fails in the published way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator
from mpicomp import CascadingSSDM


def gaussian(size: int, n: int) -> NDArray[np.float32]:
    """Return normally distributed values, one row a rank."""
    return np.random.default_rng(size).standard_normal((size, n)).astype(np.float32)


def test_normalised_results_have_the_ranks_mean_length(comm: Communicator) -> None:
    every = gaussian(comm.size, 5003)
    plain, normalised = (CascadingSSDM(flag).start(comm, 5003).aggregate(every[comm.rank]) for flag in (False, True))
    assert ((plain > 0) == (normalised > 0)).all()
    lengths = np.linalg.norm(every.astype(np.float64), axis=1)
    assert np.linalg.norm(normalised.astype(np.float64)) == pytest.approx(lengths.mean(), rel=1e-3)


@pytest.mark.parametrize("mpi_comm", [3, 8], indirect=True)
def test_signs_match_no_better_than_a_coin_and_amplitudes_explode(comm: Communicator) -> None:
    size, chunk = comm.size, 4096
    n = size * chunk
    every = gaussian(size, n)
    result = CascadingSSDM().start(comm, n).aggregate(every[comm.rank]).astype(np.float64)
    exact = every.astype(np.float64).mean(axis=0)
    assert 0.48 < ((result >= 0) == (exact >= 0)).mean() <= 0.52
    # a hop sends +-N, N the norm of its sum, and so multiplies the norm by the square root of the length
    expected = math.sqrt(chunk) * chunk ** ((size - 1) / 2) / size
    amplitude = np.abs(result).reshape(size, chunk)
    assert (amplitude == amplitude[:, :1]).all(), "one magnitude per chunk"
    assert (np.abs(np.log(amplitude[:, 0] / expected)) < 0.1).all()
    assert expected > {3: 1e4, 8: 1e14}[size] * np.abs(exact).mean()
