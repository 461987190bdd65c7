"""Exchanges of frameworks over a communicator: rows, sums and objects of the ranks that are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import mpicomp
from mpicomp.torch.process_group.survivors import broadcast_from, gather_rows, open_communicator, reduce_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_sums_and_rows_have_the_shape_and_type_of_the_tensor(dtype: str) -> None:
    def exchange(comm: Any) -> Any:
        own = torch.tensor([[1, 2], [3, 7]], device="cpu", dtype=getattr(torch, dtype)) * (comm.rank + 1)
        operations = ("sum", "mean", ReduceOp.AVG, ReduceOp.MIN, "max")
        return gather_rows(comm, own), [reduce_rows(comm, own, op) for op in operations]

    for rows, reduced in mpicomp.run_local(3, exchange):
        assert rows[:, 1].tolist() == [[3, 7], [6, 14], [9, 21]]
        assert [one.tolist()[1] for one in reduced] == [[18, 42], [6, 14], [6, 14], [3, 7], [9, 21]]
        assert {one.dtype for one in (rows, *reduced)} == {getattr(torch, dtype)}


def test_another_reduction_is_refused() -> None:
    tensor = torch.ones(1, device="cpu", dtype=torch.float32)
    with mpicomp.Communicator() as comm:
        for op in ("product", ReduceOp.PRODUCT, ReduceOp.PREMUL_SUM, None, 7):
            with pytest.raises(ValueError, match=r"have no reduction .*: sum, mean, avg, min, max$"):
                reduce_rows(comm, tensor, op)


def test_an_object_comes_from_its_rank_or_from_the_first_survivor() -> None:
    def exchange(comm: Any) -> Any:
        alive = broadcast_from(comm, comm.rank, 2)
        return alive, broadcast_from(comm, comm.rank, 7)  # no member has this number any more

    assert mpicomp.run_local(3, exchange) == [(2, 0)] * 3


def test_options_of_a_communicator_that_is_given_are_refused() -> None:
    with mpicomp.Communicator() as comm:
        assert open_communicator(comm, "raise", None) is comm
        with pytest.raises(ValueError, match="on_failure='regroup' is an option of comm: pass it to"):
            open_communicator(comm, "regroup", mpicomp.Dense())


def test_no_communicator_is_made_to_regroup_without_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicomp.torch.process_group.survivors.Communicator", None)
    with pytest.raises(ValueError, match="on_failure='regroup' needs an algorithm, such as"):
        open_communicator(None, "regroup", None)
