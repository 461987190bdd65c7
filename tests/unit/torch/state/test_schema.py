"""States of optimizers that one rank cannot load: no rank loads its own, and none waits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from collectives import CollectiveMismatch
from mpicomp import Communicator, DoubleSqueeze, Marsit, run_local
from tests.mpi.torch.training import make_model, parameters_of, train, wrap

MODEL = make_model()  # once: the ranks are threads, which share torch's random numbers
DAMAGES: dict[str, Any] = {
    "no dict": lambda state: [],
    "a plain optimizer's": lambda state: {key: state[key] for key in state if key != "mpicomp"},
    "own part": lambda state: state | {"mpicomp": [1]},
    "no mode": lambda state: changed(state, {}, "mode"),
    "huge mode": lambda state: changed(state, 10**400, "mode"),
    "rank": lambda state: changed(state, 0, "rank"),
    "number of ranks": lambda state: changed(state, 4, "ranks"),
    "buckets": lambda state: changed(state, 3, "buckets"),
    "buckets of numbers": lambda state: changed(state, [[3]], "buckets"),
    "empty buckets": lambda state: changed(state, [[]], "buckets"),
    "a parameter twice": lambda state: changed(state, state["mpicomp"]["buckets"] * 2, "buckets"),
    "a renamed parameter": lambda state: changed(state, ["other"], "buckets", 0),
    "rounds": lambda state: changed(state, None, "rounds"),
    "no counter": lambda state: changed(state, {"masters": {}, "common": {}, "steps": 0}, "rounds"),
    "huge counter": lambda state: changed(state, 10**400, "rounds", "rounds"),
    "negative counter": lambda state: changed(state, -1, "rounds", "rounds"),
    "aggregators": lambda state: changed(state, {}, "aggregators"),
    "few aggregators": lambda state: changed(state, [], "aggregators"),
    "an aggregator": lambda state: changed(state, 5, "aggregators", -1),
    "an aggregator's step": lambda state: changed(state, 10**19, "aggregators", -1, "step"),
    "an aggregator's n": lambda state: changed(state, "5", "aggregators", 0, "n"),
    "an aggregator's residual": lambda state: changed(state, torch.zeros(3), "aggregators", -1, "residual"),
    "a residual of bfloat16": lambda state: changed(state, torch.zeros(3).bfloat16(), "aggregators", -1, "residual"),
    "a sparse residual": lambda state: changed(state, torch.eye(3).to_sparse(), "aggregators", -1, "residual"),
    "no groups": lambda state: {key: state[key] for key in state if key != "param_groups"},
    "groups": lambda state: state | {"param_groups": 5},
    "a group": lambda state: state | {"param_groups": [{"params": [0]}]},
    "a group of other parameters": lambda state: state | {"param_groups": [{"params": [[], {}, 0, 1]}]},
    "state": lambda state: state | {"state": 3},
    "state that Adam looks at last": lambda state: state | {"state": {0: {"exp_avg": torch.zeros(37, 10)}}},
}
UPDATES: dict[str, Any] = {
    "masters": lambda state: changed(state, [], "rounds", "masters"),
    "more masters": lambda state: changed(state, {"0.bias": torch.zeros(37)}, "rounds", "masters"),
    "no masters": lambda state: changed(state, {"0.bias": 3}, "rounds", "masters"),
    "steps": lambda state: changed(state, True, "rounds", "steps"),
    "common": lambda state: changed(state, {}, "rounds", "common"),
    "common of integers": lambda state: changed(state, torch.zeros(3, dtype=torch.int64), "rounds", "common", "0.bias"),
}


def changed(state: dict[str, Any], value: Any, *place: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    inside = state["mpicomp"]
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return state


def load_with_a_damage(comm: Communicator, damage: Any, **options: Any) -> None:
    """Rank 1's state is damaged; all ranks go on from where they are."""
    models = [copy.deepcopy(MODEL) for _ in range(2)]
    optimizer, untouched = optimizers = [wrap(model, Marsit(7), comm, "adam", **options) for model in models]

    def go_on(steps: range) -> None:
        for model, one in zip(models, optimizers, strict=True):
            train(model, one, comm, steps)

    go_on(range(2))
    state = copy.deepcopy(optimizer.state_dict())
    go_on(range(2, 4))
    if comm.rank == 1:
        error, told, given = ValueError, r"^rank 1 of 3: ", damage(state)
    else:
        error, told, given = CollectiveMismatch, "rank 1 rejects restoring an optimizer: rank 1 of 3: ", state
    for _ in range(2):
        with pytest.raises(error, match=told) as caught:
            optimizer.load_state_dict(given)
        assert comm.rank != 1 or str(caught.value).isprintable()
    assert str(optimizer.state_dict()) == str(untouched.state_dict())
    go_on(range(4, 6))
    assert torch.equal(*map(parameters_of, models))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_state_that_one_rank_cannot_load_changes_nothing_on_any(damage: Any) -> None:
    run_local(3, lambda comm: load_with_a_damage(comm, damage))


@pytest.mark.parametrize("damage", UPDATES.values(), ids=UPDATES)
def test_the_same_within_a_round_of_local_steps(damage: Any) -> None:
    run_local(3, lambda comm: load_with_a_damage(comm, damage, synchronize="updates", local_steps=4))


def test_states_of_different_synchronizations_are_told() -> None:
    def work(comm: Communicator) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = wrap(model, Marsit(7), comm)
        states = []
        for step in range(2):
            train(model, optimizer, comm, range(step, step + 1))
            states.append(copy.deepcopy(optimizer.state_dict()))
        now = str(optimizer.state_dict())
        with pytest.raises(CollectiveMismatch, match=r"restoring an optimizer after 1 sync.*after 2 sync"):
            optimizer.load_state_dict(states[comm.rank])
        assert str(optimizer.state_dict()) == now
        optimizer.load_state_dict(states[0])
        assert optimizer.synchronizations == 1

    run_local(2, work)


def test_a_state_is_checked_without_the_others() -> None:
    def work(comm: Communicator) -> None:
        model = copy.deepcopy(MODEL)
        optimizer, fresh = wrap(model, Marsit(7), comm), wrap(copy.deepcopy(MODEL), Marsit(7), comm)
        train(model, optimizer, comm, range(1))
        if comm.rank == 0:
            state = optimizer.state_dict()
            optimizer.check_state_dict(state)
            fresh.check_state_dict(state)
            assert not fresh.aggregators
            with pytest.raises(ValueError, match="not an integer from 0"):
                optimizer.check_state_dict(changed(state, -1, "aggregators", 0, "step"))

    run_local(2, work)


def test_owners_errors_are_not_lost_by_a_state_of_another_topology() -> None:
    method = DoubleSqueeze("one-bit:bucket=64")

    def trained(comm: Communicator) -> dict[str, Any]:
        model = copy.deepcopy(MODEL)
        optimizer = wrap(model, method, comm)
        train(model, optimizer, comm, range(3))
        return copy.deepcopy(optimizer.state_dict())

    states = run_local(3, trained, "star")

    def load(comm: Communicator) -> None:
        wrap(copy.deepcopy(MODEL), method, comm).load_state_dict(states[comm.rank])

    def refuse(comm: Communicator) -> None:
        with pytest.raises((ValueError, CollectiveMismatch), match=r"mpicomp\.redistribute"):
            load(comm)

    run_local(3, load, "star")
    run_local(3, refuse, "ring")
