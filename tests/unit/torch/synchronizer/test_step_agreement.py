"""Ranks agree on a step by sums that count the ranks which made the call, and compare samples of their models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import CollectiveMismatch, Communicator
from collectives.threads.run_local import run_local
from mpicomp import Dense
from mpicomp.torch import DistributedOptimizer
from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.synchronizer import step_agreement
from mpicomp.torch.synchronizer.step_agreement import SAMPLE_ELEMENTS, StepAgreement, StepIntent


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


@pytest.mark.parametrize("shape", [(), (1023,), (1025,), (3, 5), (64, 4096), (96, 3072), (5000, 2)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_samples_reach_every_element(
    shape: tuple[int, ...], channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    if channels_last:
        values = values.t().contiguous().t() if values.ndim == 2 else values
    members = [NamedParameter(name, torch.nn.Parameter(values)) for name in "ab"]
    seen: set[float] = set()

    def keep(part: Tensor) -> Tensor:
        seen.update(part.reshape(-1).tolist())
        return torch.zeros(1, dtype=torch.uint8)

    monkeypatch.setattr(step_agreement, "tensor_bytes", keep)
    visits = 2 * -(-values.numel() // SAMPLE_ELEMENTS)  # a half of them may be shorter than a sample
    for turn in range(2 * visits):
        agreement: Any = SimpleNamespace(_turn=turn, members=members, common={})
        StepAgreement._sample(agreement)
    assert len(seen) == values.numel()
