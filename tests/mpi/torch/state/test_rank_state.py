"""DistributedOptimizer's state goes through state_dict to the bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import Communicator
from mpicomp import Dense, Marsit
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import make_model, parameters_of, same_on_all_ranks, train, wrap, wrapped

pytestmark = up_to_two_ranks


def through_torch_load(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the aggregators' own arrays, as it was kept formerly."""
    state = copy.deepcopy(state)
    for aggregator in state["mpicomp"]["aggregators"]:
        aggregator.update({key: value.numpy() for key, value in aggregator.items() if torch.is_tensor(value)})
    return state


@pytest.mark.parametrize(
    ("optimizer", "local_steps", "dtype", "kept"),
    [
        ("momentum", 1, torch.float32, copy.deepcopy),
        ("adam", 4, torch.float32, copy.deepcopy),
        ("adam", 1, torch.bfloat16, copy.deepcopy),
        ("momentum", 4, torch.bfloat16, copy.deepcopy),
        ("adam", 1, torch.float32, through_torch_load),
        ("adam", 1, torch.float32, with_arrays),
    ],
)
def test_resumed_training_has_the_same_bits(
    comm: Communicator, optimizer: str, local_steps: int, dtype: torch.dtype, kept: Callable[[Any], Any]
) -> None:
    algorithm = Marsit(full_precision_every=7)
    model = make_model(dtype=dtype)
    distributed = wrap(model, algorithm, comm, optimizer, local_steps=local_steps)
    train(model, distributed, comm, range(10))
    parameters, state = copy.deepcopy(model.state_dict()), kept(distributed.state_dict())
    train(model, distributed, comm, range(10, 18))

    resumed = make_model(seed=5, dtype=dtype)
    distributed = wrap(resumed, algorithm, comm, optimizer, local_steps=local_steps)
    resumed.load_state_dict(parameters)
    distributed.load_state_dict(state)
    train(resumed, distributed, comm, range(10, 18))
    assert torch.equal(parameters_of(resumed), parameters_of(model))


def test_a_state_from_longer_rounds_closes_its_round_at_the_next_step(comm: Communicator) -> None:
    model, distributed = wrapped(Dense(), comm, synchronize="updates", local_steps=5)
    train(model, distributed, comm, range(4))
    saved = copy.deepcopy(distributed.state_dict())
    distributed = wrap(model, Dense(), comm, synchronize="updates", local_steps=2)
    distributed.load_state_dict(saved)
    train(model, distributed, comm, range(4, 5))
    assert not distributed.models_differ
    assert same_on_all_ranks(model, comm)


def test_state_is_a_copy(comm: Communicator) -> None:
    model, distributed = wrapped(Marsit(), comm)
    train(model, distributed, comm, range(3))
    saved = distributed.state_dict()["mpicomp"]
    before = copy.deepcopy(saved)
    train(model, distributed, comm, range(3, 6))
    for old, new in zip(before["aggregators"], saved["aggregators"], strict=True):
        for key, value in old.items():
            assert (value == new[key]).all() if hasattr(value, "all") else value == new[key]


def test_a_plain_optimizers_state_is_refused(comm: Communicator) -> None:
    distributed = wrap(make_model(), Marsit(), comm)
    with pytest.raises(ValueError, match=r"plain optimizer's state.*\.optimizer"):
        distributed.load_state_dict(distributed.optimizer.state_dict())


def test_another_modes_state_is_refused(comm: Communicator) -> None:
    model = make_model()
    saved = wrap(model, Dense(), comm).state_dict()
    with pytest.raises(ValueError, match="synchronize='gradients'"):
        wrap(model, Dense(), comm, synchronize="updates").load_state_dict(saved)


@pytest.mark.parametrize("synchronize", ["gradients", "updates"])
def test_a_state_that_fits_in_part_changes_nothing(comm: Communicator, synchronize: str) -> None:
    model, distributed = wrapped(Marsit(), comm, synchronize=synchronize)
    train(model, distributed, comm, range(2))
    state = copy.deepcopy(distributed.state_dict())
    train(model, distributed, comm, range(2, 4))
    before = copy.deepcopy(distributed.state_dict())
    assert len(state["mpicomp"]["aggregators"]) > 1
    state["mpicomp"]["aggregators"][-1]["residual"][0] = float("nan")
    with pytest.raises(ValueError, match=f"rank {comm.rank} of {comm.size}.*residual holds NaN"):
        distributed.load_state_dict(state)
    after = distributed.state_dict()
    assert str(after["state"]) == str(before["state"])
    for old, new in zip(before["mpicomp"]["aggregators"], after["mpicomp"]["aggregators"], strict=True):
        assert old["step"] == new["step"]
        assert (old["residual"] == new["residual"]).all()


def test_a_state_of_another_model_is_refused_before_anything_is_changed(comm: Communicator) -> None:
    model, distributed = wrapped(Dense(), comm, synchronize="updates", local_steps=2)
    train(model, distributed, comm, range(1))
    state = copy.deepcopy(distributed.state_dict())
    state["mpicomp"]["rounds"]["common"] = {}
    with pytest.raises(ValueError, match="same options and model"):
        distributed.load_state_dict(state)
    assert distributed.models_differ
