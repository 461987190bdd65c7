"""Ranks that are threads: they reduce, exchange and wait as processes do, and no rank is left waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from collectives.consistency.call_check import TEXT_TAG
from collectives.dense import broadcast_gather
from collectives.threads.run_local import run_local
from collectives.threads.thread_comm import LocalComm
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
        payloads = [np.full(7 * source % 11 * 5, source, np.uint8) for source in range(ranks)]
        np.testing.assert_array_equal(comm.allgather(payloads[comm.rank]), np.concatenate(payloads))
        assert comm.allgather_object(comm.rank) == [*range(ranks)]
        for root in range(ranks):
            values = np.full(13, comm.rank, np.float32)
            comm.broadcast(values, root)
            assert (values == root).all()

    run_local(ranks, work, timeout=TIMEOUT_S)
    monkeypatch.setattr(broadcast_gather, "PART_BYTES", 16)  # several rounds
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


@every_size
def test_groups_of_threads_are_numbered_as_those_of_processes(ranks: int) -> None:
    def work(comm: Communicator) -> tuple[Any, Any]:
        group = comm.split(comm.rank % 2, key=-comm.rank)
        assert group is not None
        with group:
            inner = group.split(None if group.rank == 0 else 3)
            total = group.allreduce(np.full(5, comm.rank))
            return group.allgather_object(comm.rank), (total[0], inner and inner.allgather_object(comm.rank))

    for rank, (members, (total, inner)) in enumerate(run_local(ranks, work, timeout=TIMEOUT_S)):
        expected = [one for one in reversed(range(ranks)) if one % 2 == rank % 2]
        assert (members, total) == (expected, sum(expected))
        assert inner == (expected[1:] if rank != expected[0] else None)


def test_threads_share_a_node() -> None:
    assert run_local(3, lambda comm: (comm.local_rank, comm.local_size)) == [(rank, 3) for rank in range(3)]


def test_a_trace_is_written_for_every_rank(tmp_path: Path) -> None:
    run_local(3, lambda comm: comm.allreduce(np.ones(10)), trace=tmp_path, timeout=TIMEOUT_S)
    assert len(list(tmp_path.glob("rank-*.json"))) == 3


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
        run_local(3, work, timeout=3 * TIMEOUT_S)
    assert caught.value.__notes__ == [f"raised on rank {culprit} of 3"]
    assert not swallowed
    assert time.monotonic() - start < TIMEOUT_S


def do_nothing(comm: Communicator) -> None:
    """Leave the rank without a report."""


def all_but_rank_1_meet(comm: Communicator) -> None:
    if comm.rank != 1:
        comm.barrier()


def rank_0_awaits_a_message(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.wait(comm.mpi_comm.Irecv(np.zeros(8, np.uint8), 1, 5), lambda: "rank 0 of 2: no message")


def rank_0_gets_one_that_is_too_long(comm: Communicator) -> None:
    if comm.rank:
        comm.mpi_comm.Isend(np.zeros(9, np.uint8), 0, 5)
    rank_0_awaits_a_message(comm)


@pytest.mark.parametrize(
    ("ranks", "work", "options", "error", "told"),
    [
        (3, all_but_rank_1_meet, {}, CollectiveMismatch, r"ranks 0, 2: barrier\(\); rank 1: close\(\)"),
        (2, rank_0_awaits_a_message, {"timeout": 0.4}, CollectiveTimeout, "no message after .*; all ranks answer"),
        (2, rank_0_gets_one_that_is_too_long, {}, PeerFailure, "rank 0 of 2"),
        (3, lambda comm: comm.allreduce(np.ones(3 + comm.rank)), {}, CollectiveMismatch, r"rank 0: .* of float64\[3\]"),
        (5, do_nothing, {"topology": Torus(2, 2)}, TopologyError, "5 ranks do not fill"),
        (2, do_nothing, {"network": "/nowhere/net.json"}, ValueError, "rank 0 of 2: network=.* cannot be used"),
        *((ranks, do_nothing, {}, ValueError, f"there must be 1 rank or more, not {ranks}") for ranks in (0, -1)),
    ],
)
def test_errors_are_those_of_processes_and_come_in_time(
    ranks: int, work: Callable[[Communicator], Any], options: dict[str, Any], error: type[Exception], told: str
) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=told):
        run_local(ranks, work, **({"timeout": 3 * TIMEOUT_S} | options))
    assert time.monotonic() - start < TIMEOUT_S


def test_the_rank_whose_fault_it_is_speaks_for_all_even_if_it_is_the_last_to_hear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, send = time.monotonic() + 0.2, LocalComm.Isend

    def sent_late(comm: LocalComm, message: Any, rank: int, tag: int) -> Any:
        request = send(comm, message, rank, tag)
        if comm.rank < 2 or tag < TEXT_TAG:
            return request
        return SimpleNamespace(Test=lambda: time.monotonic() > late and request.Test())

    monkeypatch.setattr(LocalComm, "Isend", sent_late)

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


@pytest.mark.parametrize("arguments", [(lambda comm: comm.rank, 4), (4, None)])
def test_arguments_in_another_order_are_named(arguments: Any) -> None:
    with pytest.raises(
        TypeError, match=r"the number of ranks comes first, then the function: write run_local\(4, func"
    ):
        run_local(*arguments)
