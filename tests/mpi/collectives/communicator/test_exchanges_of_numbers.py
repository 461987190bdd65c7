"""All-reduces of Python numbers, and the minimum and maximum of numbers and arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from tests.mpi.lanes import TIMEOUT_S, every_size, same_everywhere

over_some = pytest.mark.parametrize("comm", ["ring", "star", "auto", "mpi"], indirect=True)


@over_some
@every_size
def test_numbers_come_back_as_pythons(comm: Communicator) -> None:
    ranks = range(comm.size)
    cases: list[tuple[Any, str, Any]] = [
        (comm.rank + 0.5, "sum", sum(rank + 0.5 for rank in ranks)),
        (comm.rank + 0.5, "mean", comm.size / 2),
        (np.float32(comm.rank), "min", 0.0),
        (comm.rank, "sum", sum(ranks)),
        (comm.rank, "mean", (comm.size - 1) / 2),
        (np.int16(comm.rank), "max", comm.size - 1),
        (comm.rank == 0, "sum", 1),
        (comm.rank == 0, "mean", 1 / comm.size),
        (comm.rank == 0, "max", True),
        (np.bool_(comm.rank == comm.size), "min", False),
    ]
    for number, op, expected in cases:
        found = comm.allreduce(number, op)
        assert (type(found), found) == (type(expected), expected), (number, op)
    assert comm.traffic.calls == len(cases)


@every_size
def test_integers_are_summed_exactly_or_refused(comm: Communicator) -> None:
    most = (2**63 - 1) // comm.size
    assert comm.allreduce(most) == most * comm.size
    assert comm.allreduce(-(2**63) + 1, "min") == -(2**63) + 1
    for op, number in (("sum", most + 1), ("mean", -most - 1), ("max", 10**5000)):
        with pytest.raises(ValueError, match=rf"rank {comm.rank} of {comm.size}, allreduce\({op}\): .*pass a float"):
            comm.allreduce(number, op)


@pytest.mark.mpi(min_size=2)
def test_numbers_of_different_types_are_a_mismatch(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch, match=r"rank 0: allreduce\(sum\) of a number of type int.*float"):
        comm.allreduce(0 if comm.rank == 0 else 0.5)


def test_other_scalars_are_refused(comm: Communicator) -> None:
    for scalar in (np.complex64(1), np.str_("1"), 1j):
        told = f"rank {comm.rank} of {comm.size}, .*: cannot reduce {type(scalar).__name__}"
        with pytest.raises(TypeError, match=told):
            comm.allreduce(scalar)


def test_a_number_is_not_written_to_out(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=f"rank {comm.rank} .* is returned, not written to out"):
        comm.allreduce(1.0, out=np.zeros(1))


@over_some
@every_size
def test_nan_wins_wherever_it_is(comm: Communicator) -> None:
    for op in ("min", "max"):
        for owner in range(comm.size):
            mine = math.nan if comm.rank == owner else float(comm.rank)
            assert math.isnan(comm.allreduce(mine, op))
            for n in (3, 70_000) if owner in (0, comm.size - 1) else (3,):
                x = np.full(n, float(comm.rank), np.float32)
                x[owner % n] = mine
                result = comm.allreduce(x, op)
                assert math.isnan(result[owner % n])
                assert np.isnan(result).sum() == 1
                assert same_everywhere(comm, result)


@over_some
@every_size
@pytest.mark.parametrize("n", [1, 1000, 100_003])
def test_least_and_largest_elements_are_found(comm: Communicator, n: int) -> None:
    every = np.random.default_rng(n).standard_normal((comm.size, n))
    for dtype in (np.float16, np.float32, np.float64, np.int32, np.int64) if n < 100_000 else (np.float32, np.int64):
        drawn = (100 * every).astype(dtype)
        assert (comm.allreduce(drawn[comm.rank], "min") == drawn.min(axis=0)).all()
        assert (comm.iallreduce(drawn[comm.rank], "max").wait() == drawn.max(axis=0)).all()
        assert (comm.allreduce(drawn[comm.rank], "max", drawn[comm.rank].copy()) == drawn.max(axis=0)).all()
    brain = torch.from_numpy(every).bfloat16()
    assert torch.equal(comm.allreduce(brain[comm.rank], "max"), brain.amax(0))


def test_an_op_that_is_none_is_refused(comm: Communicator) -> None:
    for x in (1.0, np.ones(3)):
        with pytest.raises(ValueError, match="op is 'median'; choose one of 'sum', 'mean', 'min', 'max'"):
            comm.allreduce(x, "median")


def test_numbers_are_summed_where_ranks_do_not_compare(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, verify=False) as comm:
        assert comm.allreduce(1) == comm.size


@over_some
def test_operations_of_mpi_are_taken_by_their_names(comm: Communicator) -> None:
    x, most = np.full(5, comm.rank + 1.0), comm.size
    for op, want in ((MPI.SUM, most * (most + 1) / 2), (MPI.MIN, 1.0), (MPI.MAX, float(most))):
        assert (comm.allreduce(x, op) == want).all()
        assert (comm.iallreduce(x, op).wait() == want).all()
        assert comm.allreduce(comm.rank + 1.0, op) == want
    kept = x.copy()
    assert (comm.allreduce(x, MPI.SUM if comm.rank else "sum") == most * (most + 1) / 2).all()
    for op, told in (
        (MPI.PROD, r"op is MPI\.PROD; choose one of MPI\.SUM, MPI\.MIN, MPI\.MAX, 'sum'"),
        (MPI.MAXLOC, r"op is MPI\.MAXLOC; choose"),
        (MPI.Op.Create(lambda a, b, kind: None), r"an operation of MPI\.Op\.Create; choose"),
        (torch.distributed.ReduceOp.SUM, "write 'sum', or choose one of"),
        (torch.distributed.ReduceOp.AVG, "write 'mean', or"),
        ("average", "op is 'average'; write 'mean', or"),
        ("SUM", "op is 'SUM'; write 'sum', or"),
        (np.maximum, "choose one of 'sum'"),
        (None, "op is None; choose one of"),
        (["sum"], r"op is \['sum'\]; choose one of"),
    ):
        for call in (comm.allreduce, comm.iallreduce):
            with pytest.raises(ValueError, match=f"^rank {comm.rank} of {comm.size}: .*{told}"):
                call(x, op)
    assert (x == kept).all()
