"""Cascading compression fails in the published way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient, arrays
from mpicomp import CascadingSSDM
from tests.fake_device import FakeArray, FakeDevice
from tests.mpi.lanes import few_ranks


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


@few_ranks
@pytest.mark.parametrize("comm", ["ring", "double-tree", "star"], indirect=True)
def test_hops_on_devices_have_the_bits_of_hops_on_the_host(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second rank has a device, and NaN on one of them is an error on all ranks."""
    pytest.importorskip("triton", reason="kernels for GPUs need Triton, or its interpreter")
    device, n, there = FakeDevice(0), 4096 + 700, comm.rank % 2 == 0
    monkeypatch.setitem(arrays.MAKERS, arrays.CUDA, lambda index: device)
    on_host, mixed = (
        CascadingSSDM(normalise=True).start(comm, n, device="cuda" if one else "cpu") for one in (False, there)
    )

    def given(x: NDArray[np.float32]) -> Any:
        return FakeArray(x) if there else x

    for step in range(2):
        x = gaussian(comm.size + step, n)[comm.rank]
        expected, found = on_host.aggregate(x), mixed.aggregate(given(x))
        np.testing.assert_array_equal(found.there if there else found, expected)
    x = np.full(n, np.nan if comm.rank == 0 else 1, np.float32)
    with pytest.raises(NonFiniteGradient, match="from rank 0;"):
        mixed.aggregate(given(x))
    assert mixed.step == 2
