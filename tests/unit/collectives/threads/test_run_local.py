"""Ranks that are threads: they reduce, exchange and wait as processes do, and no rank is left waiting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import (
    CollectiveMismatch,
    CollectiveTimeout,
    Communicator,
    NonFiniteGradient,
    PeerFailure,
    TopologyError,
    Torus,
)
from collectives.dense import variable_size as exchange
from collectives.threads.run_local import run_local
from mpicomp import Marsit

RANKS = (1, 2, 3, 5, 8)
TIMEOUT_S = 20.0
every_size = pytest.mark.parametrize("ranks", RANKS)


# The communicator -----------------------------------------------------------------------------------------------------


@every_size
@pytest.mark.parametrize("topology", ["auto", "mpi", "ring"])
def test_dense_sums_of_every_size_are_the_same_everywhere(ranks: int, topology: str) -> None:
    for n in (0, 1, 1000, 100_003, *([1_500_000] if ranks == 3 else [])):
        every = np.random.default_rng(n).standard_normal((ranks, n)).astype(np.float32)

        def total(comm: Communicator, n: int = n, every: NDArray[Any] = every) -> tuple[Any, Any]:
            mine = every[comm.rank].copy()
            comm.allreduce(mine, out=mine)
            return mine, comm.allreduce(np.full(n, comm.rank, np.int64))

        found = run_local(ranks, total, topology, timeout=TIMEOUT_S)
        assert len({floats.tobytes() for floats, _ in found}) == 1
        np.testing.assert_allclose(found[0][0], every.sum(axis=0), rtol=1e-3, atol=1e-4)
        assert all((whole == ranks * (ranks - 1) // 2).all() for _, whole in found)


@every_size
def test_handles_are_waited_for_in_any_order(ranks: int) -> None:
    def work(comm: Communicator) -> list[Any]:
        handles = [comm.iallreduce(np.full(5000 * (1 + k), comm.rank + k, np.float32)) for k in range(4)]
        order = (range(4), reversed(range(4)))[comm.rank % 2]
        results = {k: handles[k].wait() for k in order}
        comm.barrier()
        return [results[k] for k in range(4)]

    for found in run_local(ranks, work, "ring", timeout=TIMEOUT_S):
        for k, result in enumerate(found):
            assert result.size == 5000 * (1 + k)
            assert (result == ranks * (ranks - 1) / 2 + ranks * k).all()


@every_size
def test_payloads_of_any_size_are_exchanged(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: Communicator) -> None:
        def payload(source: int, destination: int) -> NDArray[np.uint8]:
            return np.full((7 * source + 3 * destination) % 11 * 5, 16 * source + destination, np.uint8)

        mpi_comm, everyone = comm.mpi_comm, range(ranks)
        gathered = exchange.all_gather(mpi_comm, payload(comm.rank, 1), TIMEOUT_S)
        for source in everyone:
            np.testing.assert_array_equal(gathered[source], payload(source, 1))
        swapped = exchange.all_to_all(mpi_comm, [payload(comm.rank, to) for to in everyone], TIMEOUT_S)
        for source in everyone:
            np.testing.assert_array_equal(swapped[source], payload(source, comm.rank))
        for root in everyone:
            values = np.full(13, comm.rank, np.float32)
            comm.broadcast(values, root)
            assert (values == root).all()

    run_local(ranks, work, timeout=TIMEOUT_S)
    monkeypatch.setattr(exchange, "LARGEST", 16)  # several rounds
    run_local(ranks, work, timeout=TIMEOUT_S)


def test_of_a_buffer_travels_what_is_counted() -> None:
    def work(comm: Communicator) -> Any:
        mine, landing = np.full(4, comm.rank + 1.0), np.zeros((3, 4))
        for row, spec in enumerate(([16, MPI.BYTE], [2, MPI.DOUBLE], [2])):
            if comm.rank == 0:
                comm.wait(comm.mpi_comm.Isend([mine, *spec], 1, row + 1), lambda: "not sent")
            else:
                comm.wait(comm.mpi_comm.Irecv(landing[row], 0, row + 1), lambda: "not received")
        return landing

    np.testing.assert_array_equal(run_local(2, work, timeout=TIMEOUT_S)[1], [[1, 1, 0, 0]] * 3)


def test_results_come_in_rank_order_whoever_is_ready_first() -> None:
    def late(comm: Communicator) -> tuple[int, int, str]:
        time.sleep(0.01 * (comm.size - comm.rank))
        return comm.rank, comm.size, str(comm.topology)

    assert run_local(4, late) == [(rank, 4, "auto") for rank in range(4)]


def test_communicators_made_within_one_do_not_mix_their_messages() -> None:
    def work(comm: Communicator) -> Any:
        with Communicator(comm.mpi_comm, "ring", TIMEOUT_S) as ring, Communicator(comm.mpi_comm, "tree") as tree:
            pair = ring.iallreduce(np.full(9000, 1.0)), tree.iallreduce(np.full(9000, 2.0))
            order = (0, 1) if comm.rank % 2 else (1, 0)
            found = {}
            while len(found) < 2:
                for which in order:
                    if which not in found and pair[which].test():
                        found[which] = pair[which].wait()
            return found

    for found in run_local(3, work, timeout=TIMEOUT_S):
        assert (found[0] == 3).all()
        assert (found[1] == 6).all()


def test_a_trace_is_written_for_every_rank(tmp_path: Path) -> None:
    run_local(3, lambda comm: comm.allreduce(np.ones(10)), trace=tmp_path, timeout=TIMEOUT_S)
    assert len(list(tmp_path.glob("rank-*.json"))) == 3


def test_a_network_is_agreed_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank 0 of 2: network=.* cannot be used"):
        run_local(2, lambda comm: None, network=tmp_path / "none.json", timeout=TIMEOUT_S)


def test_ranks_that_wait_leave_the_processors_alone() -> None:
    def one_is_late(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(1.0)
        comm.barrier()

    run_local(8, lambda comm: comm.barrier())
    start = time.process_time()
    run_local(8, one_is_late)
    assert time.process_time() - start < 0.5


# When something goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 2])
def test_what_one_rank_raises_ends_all(culprit: int) -> None:
    swallowed = []

    def work(comm: Communicator) -> None:
        if comm.rank == culprit:
            raise KeyError("my own")
        try:
            comm.barrier()
        except Exception as error:  # noqa: BLE001 - what a careless caller might do
            swallowed.append(error)

    start = time.monotonic()
    with pytest.raises(KeyError, match="my own") as caught:
        run_local(3, work)
    assert caught.value.__notes__ == [f"raised on rank {culprit} of 3"]
    assert not swallowed
    assert time.monotonic() - start < 5


def test_a_call_that_not_all_ranks_make_ends_by_the_timeout() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"rank 0 of 3: not all ranks .* no answer from rank 1"):
        run_local(3, work, timeout=1.0)
    assert time.monotonic() - start < 5


def test_a_message_that_nobody_sends_ends_by_the_timeout() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.wait(comm.mpi_comm.Irecv(np.zeros(8, np.uint8), 1, 5), lambda: "rank 0 of 2: no message")

    with pytest.raises(CollectiveTimeout, match=r"rank 0 of 2: no message after .*; no answer from rank 1"):
        run_local(2, work, timeout=0.4)


def test_calls_that_differ_are_a_mismatch() -> None:
    with pytest.raises(CollectiveMismatch, match=r"rank 0: allreduce\(sum\) of float32\[3\]"):
        run_local(3, lambda comm: comm.allreduce(np.ones(3 + comm.rank, np.float32)), timeout=TIMEOUT_S)


def test_the_rank_whose_fault_it_is_speaks_for_all() -> None:
    def work(comm: Communicator) -> None:
        comm.allreduce(np.ones(3, np.float32 if comm.rank < 2 else "U1"))

    with pytest.raises(TypeError, match="rank 2 of 3") as caught:
        run_local(3, work, timeout=TIMEOUT_S)
    assert caught.value.__notes__ == ["raised on rank 2 of 3"]


def test_nan_is_told_of_the_ranks_that_have_it() -> None:
    def work(comm: Communicator) -> None:
        bad = comm.rank in (1, 3)
        Marsit(None).start(comm, 50).aggregate(np.full(50, np.nan if bad else 1, np.float32))

    with pytest.raises(NonFiniteGradient) as caught:
        run_local(4, work, timeout=TIMEOUT_S)
    assert caught.value.ranks == (1, 3)


def test_a_message_longer_than_its_place_is_an_error() -> None:
    def work(comm: Communicator) -> None:
        mpi_comm = comm.mpi_comm
        if comm.rank:
            mpi_comm.Isend(np.zeros(9, np.uint8), 0, 5)
        else:
            place = np.zeros(8, np.uint8)
            comm.wait(mpi_comm.Irecv(place, 1, 5), lambda: "rank 0 of 2: no message")

    with pytest.raises(PeerFailure, match="rank 0 of 2"):
        run_local(2, work, timeout=TIMEOUT_S)


def test_a_topology_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TopologyError):
        run_local(5, lambda comm: None, Torus(2, 2))


@pytest.mark.parametrize("ranks", [0, -1])
def test_there_is_at_least_one_rank(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"there must be 1 rank or more, not {ranks}"):
        run_local(ranks, lambda comm: None)
