"""Dense is the mean; cascading compression fails in the published way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from mpicomp import CascadingSSDM, Dense
from tests.mpi.lanes import TIMEOUT_S, same_everywhere, topologies
from tests.reference.one_process.allreduce import dense

EVERY_SIZE = True


def gaussian(size: int, n: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(size).standard_normal((size, n)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dense_is_the_mean(mpi_comm: MPI.Intracomm, dtype: Any) -> None:
    for topology in topologies(mpi_comm.size):
        with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
            for n in (0, 1, 5003):
                every = gaussian(comm.size, n, dtype)
                result = Dense().start(comm, n, dtype=dtype).aggregate(every[comm.rank].copy())
                assert result.dtype == dtype
                assert (result == dense(topology, every, "mean")).all(), (topology, n)


def test_dense_takes_bfloat16(mpi_comm: MPI.Intracomm) -> None:
    every = torch.from_numpy(gaussian(mpi_comm.size, 1000)).to(torch.bfloat16)
    for topology in topologies(mpi_comm.size):
        with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
            result = Dense().start(comm, 1000, dtype="bfloat16").aggregate(every[comm.rank])
        expected = dense(topology, every.float().numpy(), "mean")
        assert torch.equal(result, torch.from_numpy(expected).to(torch.bfloat16)), topology


def test_cascading_gives_every_rank_the_same_whatever_the_pieces(mpi_comm: MPI.Intracomm) -> None:
    n = 9 * 4096 + 11
    every = gaussian(mpi_comm.size, n)
    for topology in topologies(mpi_comm.size):
        found = []
        for piece_bytes in (None, 512):
            with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=piece_bytes) as comm:
                aggregator = CascadingSSDM().start(comm, n)
                found += [aggregator.aggregate(every[comm.rank]) for _ in range(2)]
                assert same_everywhere(comm, np.array(found)), topology
        assert np.isfinite(found).all()
        assert (found[0] == found[2]).all(), topology
        assert (found[1] == found[3]).all(), topology
        assert (found[0] != found[1]).any(), f"{topology}: two steps drew alike"


def test_cascading_normalised_has_the_ranks_mean_length(mpi_comm: MPI.Intracomm) -> None:
    every = gaussian(mpi_comm.size, 5003)
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        plain, normalised = (
            CascadingSSDM(flag).start(comm, 5003).aggregate(every[comm.rank]) for flag in (False, True)
        )
    assert ((plain > 0) == (normalised > 0)).all()
    lengths = np.linalg.norm(every.astype(np.float64), axis=1)
    assert np.linalg.norm(normalised.astype(np.float64)) == pytest.approx(lengths.mean(), rel=1e-3)


@pytest.mark.parametrize("mpi_comm", [3, 8], indirect=True)
def test_cascading_matches_signs_no_better_than_a_coin_and_its_amplitude_explodes(mpi_comm: MPI.Intracomm) -> None:
    size, chunk = mpi_comm.size, 4096
    n = size * chunk
    every = gaussian(size, n)
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        result = CascadingSSDM().start(comm, n).aggregate(every[comm.rank]).astype(np.float64)
    exact = every.astype(np.float64).mean(axis=0)
    assert 0.48 < ((result >= 0) == (exact >= 0)).mean() <= 0.52
    # a hop sends +-N, N the norm of what it holds, and so multiplies the norm by the square root of the length
    expected = math.sqrt(chunk) * chunk ** ((size - 1) / 2) / size
    amplitude = np.abs(result).reshape(size, chunk)
    assert (amplitude == amplitude[:, :1]).all(), "one magnitude per chunk"
    assert (np.abs(np.log(amplitude[:, 0] / expected)) < 0.1).all()
    assert expected > {3: 1e4, 8: 1e14}[size] * np.abs(exact).mean()
