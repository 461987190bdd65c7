"""Codes that are gathered elsewhere go to the root of a star, which sends their mean back: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, Star
from mpicomp import ECQSGD, QSGD, LocalTopK, OneBitSGD, TernGrad, TopKSGD
from tests.mpi.lanes import TIMEOUT_S
from tests.reference.one_process.codec_methods import codec_of, gradients

METHODS: tuple[Any, ...] = (
    QSGD(bucket=100),
    QSGD(coding="entropy"),
    ECQSGD(alpha=0.3, bucket=512),
    TernGrad(bucket=1000),
    OneBitSGD(bucket=512),
    LocalTopK(10),
    TopKSGD(7),
)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_star_gives_the_ring_s_bits_and_goes_on_from_its_state(
    mpi_comm: MPI.Intracomm, method: Any, dtype: Any
) -> None:
    n = 10_003 if dtype != np.float64 else 1
    vectors = [gradients(mpi_comm.size, n, dtype, step)[mpi_comm.rank] for step in range(4)]
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        ring = method.start(comm, n, dtype=dtype)
        expected = [ring.aggregate(vector) for vector in vectors[:2]]
        half = ring.state_dict()
        expected += [ring.aggregate(vector) for vector in vectors[2:]]
    with Communicator(mpi_comm, Star(mpi_comm.size - 1), TIMEOUT_S, piece_bytes=1000) as comm:
        star, later = (method.start(comm, n, dtype=dtype) for _ in range(2))
        for vector, result in zip(vectors, expected, strict=True):
            np.testing.assert_array_equal(star.aggregate(vector), result)
        later.load_state_dict(half)
        for vector, result in zip(vectors[2:], expected[2:], strict=True):
            np.testing.assert_array_equal(later.aggregate(vector), result)


@pytest.mark.parametrize("method", [QSGD(), OneBitSGD(), LocalTopK(100, 6400)], ids=str)
def test_the_root_sends_the_mean_and_the_others_their_codes(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n, size = 64_000, mpi_comm.size
    with Communicator(mpi_comm, Star(), TIMEOUT_S) as comm:
        aggregator = method.start(comm, n)
        aggregator.aggregate(gradients(size, n, np.float32, 0)[comm.rank])
        sent = aggregator.traffic.last.bytes_sent - 8 * (size - 1)  # whether all went well
    expected = 4 * n * (size - 1) if mpi_comm.rank == 0 else codec_of(method).nbytes(n)
    assert expected <= sent <= 1.02 * expected + 128 * size
