"""Dense all-reduce: the right sum, in the plan's order, however it is cut and whenever it arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, DoubleTree, Ring, Star, Traffic
from collectives.dense import allreduce
from collectives.execution import pipelined
from collectives.execution.call import Call
from collectives.schedules.registry import TOPOLOGIES
from tests.mpi.lanes import TIMEOUT_S, eight_too, every_size, same_everywhere, topologies
from tests.reference.one_process.allreduce import dense

LONG = 100_003
BFLOAT16 = torch.bfloat16
over_all = pytest.mark.parametrize("comm", [*TOPOLOGIES, "auto", "mpi"], indirect=True)


@cache
def drawn() -> NDArray[np.float64]:
    """Numbers for eight ranks; the same on every rank. Sums of them round, but never overflow."""
    return np.random.default_rng(0).standard_normal((8, LONG))


def vectors(size: int, n: int, dtype: Any = np.float32) -> NDArray[Any]:
    """One row a rank."""
    rows = drawn()[:size, :n]
    return (1000 * rows).astype(dtype) if np.issubdtype(dtype, np.integer) else rows.astype(dtype)


def sum_along(
    comm: Communicator, values: NDArray[Any], dtype: str, mean: bool, out: NDArray[Any], traffic: Traffic
) -> None:
    """Sum as part of a call on which the ranks have agreed."""
    call = Call(comm, lambda: "a dense sum")
    comm.run(call, comm.dense_steps(call, values, dtype, mean, out, traffic))


@over_all
@every_size
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_floats_are_added_in_the_plans_order_on_every_rank(comm: Communicator, op: Any) -> None:
    lengths = (0, 1, 5, 1000, LONG) if op == "sum" else (1000,)
    for n, dtype in [(n, np.float32) for n in lengths] + [(1000, np.float16), (1000, np.float64)]:
        every = vectors(comm.size, n, dtype)
        mine = every[comm.rank].copy()
        result = comm.allreduce(mine, op)
        assert result.dtype == dtype
        assert (mine == every[comm.rank]).all(), "the input was changed"
        assert same_everywhere(comm, result)
        if isinstance(comm.topology, str):
            exact = every.astype(np.float64).sum(axis=0) / (comm.size if op == "mean" else 1)
            rounding = 2 * comm.size * np.finfo(dtype).eps
            np.testing.assert_allclose(result, exact, rtol=rounding, atol=rounding * np.abs(every).max(initial=0))
        else:
            assert (result == dense(comm.topology, every, op)).all(), (n, dtype)


@over_all
@every_size
def test_a_sum_in_the_background_has_the_same_bits(comm: Communicator) -> None:
    cases: list[tuple[int, Any, Any]] = [
        *((5, np.float32, "mean"), (1000, np.float32, "sum"), (1000, np.float16, "mean")),
        *((30_000, np.float64, "mean"), (LONG, np.float32, "sum")),
    ]
    for n, dtype, op in cases:
        mine = vectors(comm.size, n, dtype)[comm.rank]
        want, other = comm.allreduce(mine, op), comm.allreduce(mine[::-1].copy(), op)
        handles = [comm.iallreduce(mine, op), comm.iallreduce(mine[::-1].copy(), op), comm.iallreduce(mine, op)]
        for handle, expected in reversed([*zip(handles, (want, other, want), strict=True)]):
            assert (handle.wait() == expected).all(), (n, dtype)
        written = mine.copy()
        assert (comm.iallreduce(written, op, out=written).wait() == want).all(), (n, dtype)


@over_all
def test_integers_are_summed_exactly(comm: Communicator) -> None:
    for n, dtype in ((0, np.int32), (5, np.int32), (1000, np.int64)):
        every = vectors(comm.size, n, dtype)
        assert (comm.allreduce(every[comm.rank]) == every.sum(axis=0)).all(), (n, dtype)


@over_all
def test_bfloat16_is_summed_in_float32_and_rounded_once(comm: Communicator) -> None:
    cases: list[tuple[int, Any]] = [(1, "sum"), (1000, "sum"), (1000, "mean")]
    for n, op in cases:
        every = torch.from_numpy(vectors(comm.size, n)).to(BFLOAT16)
        result = comm.allreduce(every[comm.rank], op)
        assert result.dtype == BFLOAT16
        wide = every.float().numpy()
        if isinstance(comm.topology, str):
            expected = torch.from_numpy(wide.sum(axis=0)) / (comm.size if op == "mean" else 1)
            torch.testing.assert_close(result.float(), expected, rtol=2**-7, atol=1e-5)
        else:
            expected = torch.from_numpy(dense(comm.topology, wide, op)).to(BFLOAT16)
            assert torch.equal(result, expected)
        # the same numbers as NumPy holds them: two bytes each that it has no name for
        raw = np.empty(n, np.uint16)
        sum_along(comm, every[comm.rank].view(torch.uint16).numpy(), "bfloat16", op == "mean", raw, Traffic())
        assert (raw == result.view(torch.uint16).numpy()).all()


@over_all
def test_the_result_goes_where_it_is_asked_for(comm: Communicator) -> None:
    for n, dtype in ((0, np.float64), (1000, np.float16), (1000, np.int64), (LONG, np.float32)):
        every = vectors(comm.size, n, dtype)
        expected = comm.allreduce(every[comm.rank])
        elsewhere, in_place = np.full(n, 7, dtype), every[comm.rank].copy()
        assert comm.allreduce(every[comm.rank], out=elsewhere) is elsewhere
        assert comm.allreduce(in_place, out=in_place) is in_place
        assert (elsewhere == expected).all(), (n, dtype)
        assert (in_place == expected).all(), (n, dtype)
        mine = every[comm.rank].copy()  # in place on one rank alone
        assert (comm.allreduce(mine, out=mine if comm.rank == 0 else None) == expected).all(), (n, dtype)


def test_any_shape_and_library_comes_back_as_it_went_in(comm: Communicator) -> None:
    ones = np.ones((3, 1, 4))
    assert comm.allreduce(ones).shape == (3, 1, 4)
    assert comm.allreduce(np.ones(())).shape == ()
    tensor = comm.allreduce(torch.ones(2, 3, dtype=torch.float16))
    assert torch.equal(tensor, torch.full((2, 3), float(comm.size), dtype=torch.float16))


@every_size
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_neither_pieces_nor_slots_nor_arrival_order_change_a_sum(
    mpi_comm: MPI.Intracomm, dtype: Any, jitter: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 2503
    every = vectors(mpi_comm.size, n, dtype)
    tried = topologies(mpi_comm.size) if dtype == np.float32 else [Ring(), DoubleTree()]
    for topology in tried:
        expected = dense(topology, every)
        for piece_bytes, slots in ((64, 1), (512, 3), (None, 40)):
            monkeypatch.setattr(allreduce, "RECEIVE_BUFFERS", slots)
            with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=piece_bytes) as comm:
                assert (comm.allreduce(every[comm.rank]) == expected).all(), (topology, piece_bytes, slots)
    jitter(mpi_comm.rank)
    for topology in tried:
        for piece_bytes in (2048, None):
            with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=piece_bytes) as comm:
                assert (comm.allreduce(every[comm.rank]) == dense(topology, every)).all(), topology


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("scratch", "longest"), [([], allreduce.PIECE_BYTES), (None, allreduce.NODE_PIECE_BYTES)])
def test_sums_of_methods_that_lend_memory_keep_less_of_their_own(
    scratch: list[Any] | None, longest: int, mpi_comm: MPI.Intracomm
) -> None:
    values = np.ones(mpi_comm.size * allreduce.NODE_PIECE_BYTES // 4, np.float32)
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        call = Call(comm, lambda: "a sum")
        comm.run(call, comm.dense_steps(call, values, "float32", False, values, Traffic(), scratch))
        assert (values == comm.size).all()
        assert {place.nbytes for place in comm.dense_buffers} == {longest}


@pytest.mark.mpi(min_size=2)
def test_long_pieces_do_not_stay_in_memory(mpi_comm: MPI.Intracomm) -> None:
    longest = 2 * allreduce.NODE_PIECE_BYTES
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=longest) as comm:
        for nbytes in (100_000, 4 * longest):
            comm.allreduce(np.ones(nbytes // 4, np.float32))
        assert (
            sum(place.nbytes for place in comm.dense_buffers) <= allreduce.RECEIVE_BUFFERS * allreduce.NODE_PIECE_BYTES
        )
    assert not comm.dense_buffers


@eight_too
def test_ranks_that_run_a_plan_stepwise_and_ranks_that_pipeline_it_understand_each_other(
    mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = vectors(mpi_comm.size, 2503)
    if mpi_comm.rank % 2:
        monkeypatch.setattr(pipelined, "runs_stepwise", lambda program, payload: False)
    for topology in topologies(mpi_comm.size):
        with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
            assert (comm.allreduce(every[comm.rank]) == dense(topology, every)).all(), topology


def test_where_one_rank_sums_many_it_does_so_in_rank_order(mpi_comm: MPI.Intracomm) -> None:
    every = vectors(mpi_comm.size, 1000)
    expected = every[0].copy()
    for row in every[1:]:
        expected += row
    with Communicator(mpi_comm, Star(), TIMEOUT_S) as comm:
        assert (comm.allreduce(every[comm.rank]) == expected).all()


@pytest.mark.mpi(min_size=2)
def test_a_ring_sends_what_the_textbook_says(mpi_comm: MPI.Intracomm) -> None:
    size, n = mpi_comm.size, 64 * 840
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        for dtype, nbytes in (("float32", 2 * 4), ("float64", 2 * 8), ("float16", 4 + 2)):
            traffic = Traffic()
            zeros = np.zeros(n, dtype)
            sum_along(comm, zeros, dtype, False, zeros, traffic)
            assert traffic.bytes_sent == nbytes * n * (size - 1) // size
