"""Small dense sums, which travel with the check that all ranks make the same call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.consistency import recursive_doubling
from collectives.consistency.call_check import AT_ONCE
from tests.mpi.lanes import TIMEOUT_S, every_size, same_everywhere

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.communicator(topology="auto")]


verified_or_not = pytest.mark.parametrize("verify", [True, False], ids=["verified", "not-verified"])


@pytest.fixture
def comm(verify: bool, mpi_comm: MPI.Intracomm) -> Iterator[Communicator]:
    with Communicator(mpi_comm, timeout=TIMEOUT_S, verify=verify) as made:
        yield made


def longest(comm: Communicator) -> int:
    """Float32 elements that still go this way."""
    return recursive_doubling.most_bytes(comm.size, comm.one_node) // 4


@verified_or_not
@every_size
def test_the_longest_vector_and_one_more_element_are_summed(comm: Communicator) -> None:
    for n in (longest(comm), longest(comm) + 1):
        x = np.arange(n, dtype=np.float32) + comm.rank
        expected = comm.size * np.arange(n, dtype=np.float32) + sum(range(comm.size))
        assert (comm.allreduce(x) == expected).all()
        assert (comm.allreduce(x, "mean", x) == expected / comm.size).all()


@verified_or_not
@every_size
def test_even_nan_comes_out_with_the_same_bits_everywhere(comm: Communicator) -> None:
    for n in (1, 2, 100):
        for in_place in (False, True):
            x = np.full(n, 0x7FC00000 + comm.rank, np.uint32).view(np.float32)
            result = comm.allreduce(x, out=x if in_place else None)
            assert np.isnan(result).all()
            assert same_everywhere(comm, result.view(np.uint32)), (n, in_place)


@verified_or_not
def test_overflow_is_infinite_and_warns_nobody(comm: Communicator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (10, 3_000_000):
            assert np.isinf(comm.allreduce(np.full(n, 3e38, np.float32))).all()


@verified_or_not
def test_lengths_that_come_only_once_take_no_more_memory(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recursive_doubling, "MOST_REMEMBERED", 4)
    for n in range(20):
        assert (comm.allreduce(np.ones(n)) == comm.size).all()
    assert all(len(exchange._known) <= 4 for exchange in comm.call_check._exchanges)


@verified_or_not
@every_size
def test_what_a_call_costs_is_counted(comm: Communicator) -> None:
    before = comm.traffic.bytes_sent
    comm.allreduce(np.ones(100, np.float32))
    sent = [one.sends for one in recursive_doubling.rounds_of(comm.rank, comm.size)].count(True)
    assert comm.traffic.bytes_sent - before == sent * (recursive_doubling.NUMBERS_FROM + 400)
    assert comm.traffic.calls == 1


@pytest.mark.parametrize("length", [1000, 3_000_000])
def test_a_mismatch_leaves_the_vectors_alone(mpi_comm: MPI.Intracomm, length: int) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        for odd in range(comm.size):
            n = length - (comm.rank == odd)
            x = np.arange(n, dtype=np.float32)
            with pytest.raises(CollectiveMismatch, match=rf"rank {odd}: allreduce\(sum\) of float32\[{length - 1}\]"):
                comm.allreduce(x, out=x)
            assert (x == np.arange(n)).all()
        assert (comm.allreduce(np.ones(10)) == comm.size).all()


@verified_or_not
def test_calls_one_after_the_other_meet_in_the_same_memory(comm: Communicator) -> None:
    for n in range(20):
        comm.allreduce(np.ones(n))
    assert len(comm.call_check._exchanges) == 1
    handles = [comm.iallreduce(np.ones(3)) for _ in range(20)]
    assert all((handle.wait() == comm.size).all() for handle in handles)
    assert len(comm.call_check._exchanges) <= AT_ONCE
