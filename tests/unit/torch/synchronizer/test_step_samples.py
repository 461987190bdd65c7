"""Samples of models, which ranks compare in each step, reach every element in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.synchronizer import step_agreement
from mpicomp.torch.synchronizer.step_agreement import SAMPLE_ELEMENTS, StepAgreement


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
