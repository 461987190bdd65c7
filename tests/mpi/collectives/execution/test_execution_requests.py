"""Persistent requests are freed with those who use them, and are few."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.requests import free_inactive
from mpicomp import QSGD, MajorityVote, Marsit
from tests.mpi.lanes import TIMEOUT_S, few_ranks

pytestmark = [few_ranks, pytest.mark.mpi(min_size=2)]


def requests_of(comm: Communicator) -> list[MPI.Request]:
    """Return the persistent requests of the communicator's users."""
    return [request for _, cache in comm.users._requests.values() for request in cache.values()]


def test_requests_of_aggregators_that_are_gone_are_freed(comm: Communicator) -> None:
    n, methods = 20_000, (Marsit(), MajorityVote(), QSGD(coding="fixed"))
    aggregators: list[Any] = [method.start(comm, n) for method in methods]
    for number, aggregator in enumerate(aggregators, 1):
        for _ in range(2):  # the first of Marsit's is dense
            aggregator.aggregate(np.ones(n, np.float32))
        requests = requests_of(comm)
        assert len(requests) >= 2 * number
    assert MPI.REQUEST_NULL not in requests
    del aggregator, aggregators
    gc.collect()
    comm.barrier()
    assert all(request == MPI.REQUEST_NULL for request in requests)
    assert not comm.users._requests


def test_requests_are_freed_with_the_communicator(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm, "ring", TIMEOUT_S)
    aggregator = MajorityVote().start(comm, 20_000)
    aggregator.aggregate(np.ones(20_000, np.float32))
    requests = requests_of(comm)
    assert len(requests) >= 2
    comm.close()
    assert all(request == MPI.REQUEST_NULL for request in requests)


def test_vectors_of_ever_new_lengths_take_no_more_memory(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.group.routes.MOST_REMEMBERED", 4)
    for n in range(20):
        assert (comm.allreduce(np.ones(n)) == comm.size).all()
    assert len(comm.routes._programs) == len(comm.routes._calls) == 4


def test_only_requests_that_are_not_active_are_freed_after_a_death() -> None:
    mine, landing = MPI.COMM_SELF, [np.zeros(1), np.zeros(1)]
    cache = {(0, 0): mine.Recv_init(landing[0], 0, 1), (0, 1): mine.Recv_init(landing[1], 0, 2)}
    active = cache[0, 1]
    active.Start()
    free_inactive(cache)
    assert cache == {(0, 1): active}
    mine.Send(np.ones(1), 0, 2)
    active.Wait()
    free_inactive(cache)
    assert not cache
    assert landing[1] == 1
