"""State survives packing to the bit, and is never pickled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from apps.train.packing import pack, unpack


def test_nested_state_comes_back_with_its_types() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "aggregators": [{"residual": np.arange(4, dtype=np.float32), "step": np.int64(3), "name": "marsit"}],
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "words": np.array([2**64 - 1], dtype=np.uint64),
        "nothing": None,
        "special": (math.inf, True, 2**70),
    }
    back = unpack(*pack(state))
    assert back["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert isinstance(back["optimizer"]["param_groups"][0]["betas"], tuple)
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert back["aggregators"][0]["residual"].dtype == np.float32
    assert back["aggregators"][0]["step"] == 3
    assert back["half"].dtype == torch.bfloat16
    assert back["words"][0] == 2**64 - 1
    assert back["nothing"] is None
    assert back["special"] == state["special"]


def test_keys_that_look_like_markers_are_still_keys() -> None:
    state = {"tensor": "0", "dict": {"array": [1]}}
    assert unpack(*pack(state)) == state


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(TypeError, match="cannot pack a set"):
        pack({"a": {1, 2}})
