"""Ranks agree on a step by sums that count the ranks which made the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import CollectiveMismatch, Communicator
from collectives.threads.run_local import run_local
from mpicomp import Dense
from mpicomp.torch import DistributedOptimizer
from mpicomp.torch.synchronizer.step_agreement import StepIntent


def concluded(marks: int, ranks: int) -> list[Any]:
    """Return the conclusions of two ranks, after a call of `ranks` ranks of which `marks` had the same mark."""

    def conclude(comm: Communicator) -> Any:
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(1), model.bias.fill_(0)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), Dense(), comm)
        agreement = optimizer._synchronizer.agreement
        agreement._mark = 12345
        agreement._sums[:] = (0, 0, 0, marks * agreement._mark, ranks)
        assert agreement.is_settled == (marks == ranks)
        return agreement.conclude(StepIntent())

    return run_local(2, conclude)


def test_a_step_that_a_rank_made_before_it_died_is_one_of_equal_ranks() -> None:
    assert concluded(3, 3) == [True, True]  # the third rank has died since


def test_marks_that_differ_are_a_mismatch_however_many_ranks_are_left() -> None:
    with pytest.raises(CollectiveMismatch):
        concluded(2, 3)
