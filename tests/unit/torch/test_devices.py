"""Tensors that no call can take, by name."""

from __future__ import annotations

import pytest
import torch

from mpicomp.torch.devices import require_reachable


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(2).as_subclass(type("DTensor", (torch.Tensor,), {})), "is a DTensor, of which this rank holds a"),
        (torch.zeros(2, device="meta"), "lives on meta, which cannot be reached"),
    ],
    ids=["dtensor", "meta"],
)
def test_a_parameter_that_cannot_be_averaged_is_refused_by_its_name(tensor: torch.Tensor, problem: str) -> None:
    with pytest.raises(ValueError, match=f"parameter 'layer.weight' {problem}"):
        require_reachable("parameter 'layer.weight'", tensor)
