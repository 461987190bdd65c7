"""The state in a checkpoint comes back to the bit, and is never pickled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from apps.train import checkpoint
from collectives import Communicator


def saved_and_loaded(folder: Path, state: Any) -> Any:
    with Communicator(MPI.COMM_SELF) as comm:
        checkpoint.save(folder, comm, 1, {}, {}, state)
        found = checkpoint.load(folder, comm)
    assert found is not None
    return found.state


def test_nested_state_comes_back_with_its_types(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "aggregators": [{"residual": np.arange(4, dtype=np.float32), "step": np.int64(3), "name": "marsit"}],
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "words": np.array([2**64 - 1], dtype=np.uint64),
        "nothing": None,
        "special": (math.inf, True),
    }
    back = saved_and_loaded(tmp_path, state)
    assert back["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert isinstance(back["optimizer"]["param_groups"][0]["betas"], tuple)
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert back["aggregators"][0]["residual"].dtype == np.float32
    assert back["aggregators"][0]["step"] == 3
    assert back["half"].dtype == torch.bfloat16
    assert back["words"][0] == 2**64 - 1
    assert back["nothing"] is None
    assert back["special"] == state["special"]


def test_keys_that_look_like_markers_are_still_keys(tmp_path: Path) -> None:
    state = {"tensor": "0", "dict": {"array": [1]}}
    assert saved_and_loaded(tmp_path, state) == state


def test_a_type_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot pack a set"):
        saved_and_loaded(tmp_path, {"a": {1, 2}})


def test_names_that_are_no_checkpoints_are_passed_over(tmp_path: Path) -> None:
    for name in ("step-", "step-00000001.partial", "step-1", "step-" + "9" * 100, "step-00000002", "step-100000000"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000002", "step-100000000"]
