"""Emulated links between processes: results stay the same, and messages take their time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpicomp import DoubleSqueeze, Marsit, ScaleCom
from tests.mpi.lanes import few_ranks

TIMEOUT_S = 30


@few_ranks
@pytest.mark.parametrize("method", [Marsit(full_precision_every=2), DoubleSqueeze(), ScaleCom(10)], ids=repr)
def test_results_are_those_without_a_link(mpi_comm: MPI.Intracomm, method: Any) -> None:
    found = []
    for link in (None, "1gbit,20us"):
        with Communicator(mpi_comm, "ring", TIMEOUT_S, link=link) as comm:
            aggregator, x = method.start(comm, 3000), np.random.default_rng(comm.rank).standard_normal(3000, np.float32)
            steps = [aggregator.aggregate(x) for _ in range(4)]
            calls = [comm.iallreduce(x * k, "mean") for k in range(3)]
            found.append([*steps, *(call.wait() for call in calls), comm.broadcast(x, root=0), comm.allgather(x)])
    for plain, slow in zip(*found, strict=True):
        np.testing.assert_array_equal(slow, plain)


@few_ranks
def test_a_sum_takes_at_least_the_time_of_its_bytes(mpi_comm: MPI.Intracomm) -> None:
    n = 60_000
    with Communicator(mpi_comm, "ring", TIMEOUT_S, link="100mbit") as comm:
        x = np.ones(n, np.float32)
        comm.allreduce(x)
        comm.barrier()
        start = time.perf_counter()
        comm.allreduce(x)
        comm.barrier()
        assert time.perf_counter() - start > 2 * (comm.size - 1) / comm.size * 4 * n / 12.5e6


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("shared_by", [1, 2])
def test_processes_of_a_node_share_its_link(mpi_comm: MPI.Intracomm, shared_by: int) -> None:
    """Ranks 0 and 1 send a megabyte each to ranks 2 and 3, which takes 0.08 s at 100 Mbit/s."""
    x = np.zeros(1_000_000, np.uint8)
    with (
        Communicator(mpi_comm, timeout=TIMEOUT_S, link="100mbit", ranks_per_node=shared_by) as comm,
        comm.split(comm.rank % 2) as pair,
    ):
        comm.barrier()
        start = time.perf_counter()
        if pair.rank == 0:
            pair.send(x, 1)
        else:
            pair.recv(x, 0)
        slowest = comm.allreduce(time.perf_counter() - start, "max")
    assert slowest > 0.08 * shared_by


@pytest.mark.mpi(min_size=2, max_size=4)
def test_messages_within_a_node_are_not_held_back(mpi_comm: MPI.Intracomm) -> None:
    x = np.zeros(1_000_000, np.uint8)
    with Communicator(mpi_comm, timeout=TIMEOUT_S, link="10mbit", ranks_per_node=4) as comm:
        found = []
        while len(found) < 10 and min(found, default=1.0) >= 0.8:  # a rank may get the processor late
            start = time.perf_counter()
            if comm.rank == 0:
                comm.send(x, 1)
            elif comm.rank == 1:
                comm.recv(x, 0)
            found.append(comm.allreduce(time.perf_counter() - start, "max"))
        assert found[-1] < 0.8
