"""States of optimizers on other numbers of ranks: nothing pending is lost or doubled, and training goes on."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mpicomp import Communicator, DoubleSqueeze, Marsit, run_local
from mpicomp.torch import DistributedOptimizer, OneBitAdam, redistribute_states
from tests.methods import METHODS
from tests.mpi.torch.training import make_model, parameters_of, train, wrap

MODEL = make_model()  # once: the ranks are threads, which share torch's random numbers
State = dict[str, Any]
Build = Callable[[nn.Module, Communicator], Any]


class Run:
    """Ranks that trained: their states, before training and after it, and their common model."""

    def __init__(self, ranks: int, build: Build, before: Run | None = None, topology: str = "ring", steps: int = 3):
        """Train, going on from others' states."""
        given = None if before is None else redistribute_states(before.states, ranks)

        def work(comm: Communicator) -> tuple[State, State, nn.Module]:
            model = copy.deepcopy(MODEL if before is None else before.model)
            optimizer = build(model, comm)
            if given is not None:
                optimizer.load_state_dict(given[comm.rank])
            start = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, comm, range(steps))
            return start, copy.deepcopy(optimizer.state_dict()), model

        starts, states, models = zip(*run_local(ranks, work, topology), strict=True)
        self.starts: list[State] = list(starts)
        self.states: list[State] = list(states)
        self.model: nn.Module = models[0]
        assert all(torch.equal(parameters_of(model), parameters_of(self.model)) for model in models)
        assert parameters_of(self.model).isfinite().all()


def by(method: Any, optimizer: str = "momentum", **options: Any) -> Build:
    return lambda model, comm: wrap(model, method, comm, optimizer, **options)


def pending(states: Sequence[State]) -> list[NDArray[np.float64]]:
    """Return the residuals that the ranks have yet to give, by bucket and entry."""
    found = []
    owns = [state["mpicomp"] for state in states]
    for bucket, kinds in enumerate(owns[0]["kinds"]):
        for key, kind in kinds.items():
            kept = [own["aggregators"][bucket].get(key) for own in owns]
            if kind in ("mean", "owner") and kept[0] is not None:
                total = sum(np.asarray(one, np.float64) for one in kept)
                found.append(total / len(owns) if kind == "mean" else total)
    return found


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_is_pending_goes_from_3_ranks_to_2_and_4(method: Any) -> None:
    run = Run(3, by(method), steps=6)  # the last of which is in full precision for none but Marsit(1)
    kept = [one for one in pending(run.states) if one.size]
    assert not kept or any(one.any() for one in kept) or method.full_precision_every == 1
    for done, ranks in enumerate((2, 4), start=1):
        before, run = run, Run(ranks, by(method), before=run)
        for old, new in zip(pending(before.states), pending(run.starts), strict=True):
            np.testing.assert_allclose(new, old, rtol=0, atol=1e-6 * np.abs(old).max(initial=0))
        assert run.starts[0]["mpicomp"]["rounds"] == before.states[0]["mpicomp"]["rounds"]
        assert run.states[0]["mpicomp"]["rounds"]["rounds"] == 6 + 3 * done


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.01), amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, 0.01),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 0.01),
    "radam": lambda parameters: torch.optim.RAdam(parameters, 0.01),
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, centered=True, momentum=0.9),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, 0.01),
}


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_under_updates_new_ranks_start_from_the_mean_of_the_old_ones(made: Any) -> None:
    def build(model: nn.Module, comm: Communicator) -> DistributedOptimizer:
        return DistributedOptimizer(made(model.parameters()), Marsit(2), comm, synchronize="updates", local_steps=3)

    run = Run(3, build)
    again = Run(2, build, before=run)
    assert str(again.starts[0]["state"]) == str(again.starts[1]["state"])
    differing = 0
    for index, entries in run.states[0]["state"].items():
        for key, first in entries.items():
            found = again.starts[0]["state"][index][key]
            if key == "step" or not torch.is_tensor(first):
                assert found == first
                continue
            olds = torch.stack([state["state"][index][key] for state in run.states])
            differing += not all(torch.equal(one, first) for one in olds)
            assert torch.equal(found, olds.double().mean(0).to(first.dtype))
    assert differing


class Coded(torch.optim.SGD):
    """Momentum in codes of a type, with a scale."""

    dtype = torch.float16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            one = self.state[parameter]
            momentum = (0.9 * one["m"].float() * one["scale"] if "m" in one else 0) + parameter.grad
            one["scale"] = momentum.abs().max() / 100
            one["m"] = (momentum / one["scale"]).to(self.dtype)
            parameter.sub_(momentum, alpha=0.01)


def coded(dtype: torch.dtype, hook: Any = None) -> Build:
    def build(model: nn.Module, comm: Communicator) -> DistributedOptimizer:
        optimizer = Coded(model.parameters(), lr=0.01)
        optimizer.dtype = dtype
        if hook is not None:
            optimizer.register_state_dict_post_hook(hook)
        return DistributedOptimizer(optimizer, Marsit(2), comm, model.named_parameters(), synchronize="updates")

    return build


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn, torch.float32], ids=str)
def test_codes_with_scales_are_refused_until_the_state_is_saved_decoded(dtype: torch.dtype) -> None:
    scale, codes = r"state\[0\]\['scale'\] \(.*\)", r" and in state\[0\]\['m'\] \(.*\)"
    both = scale + codes if dtype != torch.float32 else scale
    with pytest.raises(ValueError, match=f"ranks differ in {both}, whose mean may .* decoded, in float32") as caught:
        redistribute_states(Run(3, coded(dtype)).states, 2)
    assert str(caught.value).isprintable()

    def decode(optimizer: object, state: State) -> None:
        state["state"] = {
            index: {"m": one["m"].float() * one["scale"], "scale": torch.ones(())}
            for index, one in state["state"].items()
        }

    run = Run(3, coded(dtype, decode))
    again = Run(2, coded(dtype, decode), before=run)
    for index, new in again.starts[1]["state"].items():
        olds = torch.stack([state["state"][index]["m"] for state in run.states])
        assert not torch.equal(olds[0], olds[1])
        torch.testing.assert_close(new["m"], olds.mean(0))


class Subclass(Tensor):
    """A tensor that holds other values than it shows."""


def entries(rank: int) -> dict[str, Any]:
    """Return entries of a state of a parameter of shape [37, 10] that ranks have different values of."""
    filled = torch.full((37, 10), float(rank))
    return {
        "velocity": filled,
        "ema": filled.double(),
        "exp_avg_sq_row": filled[:, 0],
        "row_var": filled[:, :1],
        "momentum_buffer": filled.bfloat16(),
        "RMS": float(rank),
        "slow": [filled, filled],
        "nested": {"exp_avg": filled, "max": filled},
        "codes": filled.to(torch.uint8),
        "bfloat16": filled.bfloat16(),
        "mask": filled > 0,
        "scale": torch.tensor(float(rank)),
        "number": float(rank),
        "integer": 7 * rank,
        "history": [None, filled][: 1 + rank],
        "absmax1": filled[0],
        "projector": torch.full((10, 37), float(rank)),
        "preconditioners": [torch.full((n, n), float(rank)) for n in (37, 10)],
        "exp_avg": filled[:, :5],
        "subclass": filled.as_subclass(Subclass),
        "step_size": torch.tensor(float(rank)),
        "sparse": filled.to_sparse(),
        "complex": filled.to(torch.complex64),
    }


LINEAR = ["velocity", "ema", "exp_avg_sq_row", "row_var", "momentum_buffer", "RMS", "slow", "nested"]


@pytest.mark.parametrize("saves_shapes", [True, False])
@pytest.mark.parametrize("name", entries(0))
def test_only_state_that_is_known_to_be_linear_is_averaged(name: str, saves_shapes: bool) -> None:
    """Older states do not have the shapes of parameters."""
    olds = ADAM.states if saves_shapes else [without(state, "mpicomp", "shapes") for state in ADAM.states]
    states = [
        changed(state, {**state["state"][0], name: entries(rank)[name]}, "state", 0) for rank, state in enumerate(olds)
    ]
    if name in LINEAR:
        assert str(redistribute_states(states, 2)[0]["state"][0][name]) == str(entries(1)[name])
    else:
        with pytest.raises(ValueError, match=rf"ranks differ in state\[0\]\['{name}'\].* in float32 and in the param"):
            redistribute_states(states, 2)


@pytest.mark.parametrize("name", entries(0))
def test_state_of_any_kind_that_is_equal_on_all_ranks_stays(name: str) -> None:
    kept = entries(2)[name]
    states = [changed(state, {**state["state"][0], name: kept}, "state", 0) for state in ADAM.states]
    assert str(redistribute_states(states, 2)[0]["state"][0][name]) == str(kept)


def test_under_gradients_the_wrapped_optimizer_goes_on_as_it_was() -> None:
    run = Run(3, by(Marsit(7), "adam", synchronize="gradients"))
    for state in redistribute_states(run.states, 2):
        assert str(state["state"]) == str(run.states[0]["state"])
        assert state["state"][0]["exp_avg"] is run.states[0]["state"][0]["exp_avg"]
    run.states[2]["state"][1]["exp_avg"][3] += 1
    with pytest.raises(ValueError, match=r"ranks 0 and 2 differ in state\[1\]\['exp_avg'\] \(torch.float32\[37\]"):
        redistribute_states(run.states, 2)


@pytest.mark.parametrize("steps", [3, 8])  # before the variance is frozen and after
def test_one_bit_adam_goes_on(steps: int) -> None:
    def build(model: nn.Module, comm: Communicator) -> Any:
        return OneBitAdam(model.parameters(), lr=0.01, warmup_steps=4, comm=comm, bucket_mb=0.001)

    run = Run(3, build, steps=steps)
    again = Run(2, build, before=run)
    for old, new in zip(pending(run.states), pending(again.starts), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-6)
        assert new.any()
    before, after = run.states[2]["mpicomp"], again.starts[1]["mpicomp"]
    assert before["frozen"] == after["frozen"] == (steps > 4)
    assert str([before[key] for key in ("m", "v", "steps")]) == str([after[key] for key in ("m", "v", "steps")])


def test_masters_of_16_bit_parameters_go_on() -> None:
    def build(model: nn.Module, comm: Communicator) -> DistributedOptimizer:
        return wrap(model.to(torch.bfloat16), Marsit(2), comm, "adam", synchronize="updates")

    run = Run(3, build)
    again = Run(2, build, before=run)
    assert len(run.states[0]["mpicomp"]["rounds"]["masters"]) == 4
    assert str(again.starts[1]["mpicomp"]["rounds"]) == str(run.states[0]["mpicomp"]["rounds"])


def test_owners_errors_go_to_the_owners_of_another_topology() -> None:
    method = DoubleSqueeze("one-bit:bucket=64")
    run = Run(3, by(method), topology="star")
    again = Run(3, by(method), before=run)
    for old, new in zip(pending(run.states), pending(again.starts), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-6)


def test_ranks_that_load_one_tensor_do_not_share_it() -> None:
    states = redistribute_states(Run(3, by(Marsit())).states, 2)

    def momentum(comm: Communicator) -> Tensor:
        optimizer = wrap(copy.deepcopy(MODEL), Marsit(), comm)
        optimizer.load_state_dict(states[comm.rank])
        return next(iter(optimizer.state.values()))["momentum_buffer"]

    first, second = run_local(2, momentum)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_files_are_converted_in_any_order_and_again() -> None:
    states = Run(3, by(Marsit(7), "adam", synchronize="updates")).states
    new = redistribute_states(states[::-1], 4)
    assert [state["mpicomp"]["rank"] for state in new] == [0, 1, 2, 3]
    assert str(new) == str(redistribute_states(states, 4))
    assert str(redistribute_states(redistribute_states(states, 1), 4)) == str(new)


def test_files_are_converted_without_memory_of_their_own_and_without_mpi(tmp_path: Path) -> None:
    states = Run(3, by(DoubleSqueeze("one-bit:bucket=64"), "adam")).states
    for rank, state in enumerate(states):
        torch.save(state, tmp_path / f"old-{rank}")
    script = """
import sys, torch
from pathlib import Path
from mpicomp.torch import redistribute_states
folder = Path(sys.argv[1])
old = [torch.load(folder / f"old-{rank}", mmap=True, weights_only=True) for rank in range(3)]
for rank, state in enumerate(redistribute_states(old, 2)):
    torch.save(state, folder / f"new-{rank}")
assert "mpi4py.MPI" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    for rank, state in enumerate(redistribute_states(states, 2)):
        assert str(torch.load(tmp_path / f"new-{rank}", weights_only=True)) == str(state)


# States that do not belong together -----------------------------------------------------------------------------------

ADAM = Run(3, by(Marsit(7), "adam", synchronize="updates"))
LATER = Run(3, by(Marsit(7), "adam", synchronize="updates"), steps=4)


def changed(state: State, value: Any, *place: Any) -> State:
    state = copy.deepcopy(state)
    inside = state
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return state


def without(state: State, *place: Any) -> State:
    state = copy.deepcopy(state)
    inside = state
    for key in place[:-1]:
        inside = inside[key]
    del inside[place[-1]]
    return state


A, B, C = ADAM.states
REFUSED: dict[str, tuple[list[Any], str]] = {
    "none": ([], "from 0 to 2"),
    "a rank is missing": ([A, C], "of the 3 ranks' states those of 1 are missing"),
    "a rank of a huge job": ([changed(A, 10**17, "mpicomp", "ranks")], "those of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 are"),
    "twice the same rank": ([A, B, B], "two of the states are of rank 1: pass one of each rank"),
    "of other numbers of ranks": (
        [A, B, changed(C, 4, "mpicomp", "ranks")],
        r"states\[2\] is of rank 2 of 4, and states\[0\] of one of 3 ranks: take states of one run",
    ),
    "no such rank": ([A, B, changed(C, -1, "mpicomp", "rank")], r"states\[2\] is of rank -1 of 3"),
    "different steps": (
        [A, B, LATER.states[2]],
        r"ranks 0 and 2 differ in rounds\['rounds'\] \(3 and 4\): take states",
    ),
    "different steps of the optimizer": (
        [A, B, changed(C, torch.tensor(4.0), "state", 0, "step")],
        r"ranks 0 and 2 differ in state\[0\]\['step'\] \(tensor\(3.\) and tensor\(4.\)\)",
    ),
    "in another order": (
        [changed(C, torch.tensor(4.0), "state", 0, "step"), B, A],
        r"ranks 0 and 2 differ in state\[0\]\['step'\] \(tensor\(3.\) and tensor\(4.\)\)",
    ),
    "different models": (
        [A, B, changed(C, ["other"], "mpicomp", "buckets", 0)],
        r"ranks 0 and 2 differ in buckets\[0\] \(\['2.bias', '2.weight', '0.bias'\] and \['other'\]\): take states of",
    ),
    "parameters of other shapes": (
        [A, B, changed(C, torch.zeros(5), "state", 0, "exp_avg")],
        r"ranks 0 and 2 differ in state\[0\]\['exp_avg'\] \(torch.float32\[37, 10\] and torch.float32\[5\]\)",
    ),
    "a parameter that one rank did not move": (
        [A, B, without(C, "state", 1)],
        "ranks 0 and 2 have 0, 1, 2, 3 and 0, 2, 3 in state: take",
    ),
    "different options": (
        [A, changed(B, 0.5, "param_groups", 0, "lr"), C],
        r"ranks 0 and 1 differ in param_groups\[0\]\['lr'\] \(0.005 and 0.5\)",
    ),
    "different optimizers": (
        [A, B, without(C, "param_groups", 0, "betas")],
        r"ranks 0 and 2 have .* in param_groups\[0\]",
    ),
    "different modes": (
        [A, B, changed(C, "gradients", "mpicomp", "mode")],
        r"ranks 0 and 2 differ in mode \('updates' and 'gradients'\)",
    ),
    "different methods": (
        [A, changed(B, {"residual": "shared"}, "mpicomp", "kinds", 0), C],
        r"ranks 0 and 1 have .* in kinds\[0\]",
    ),
    "a plain optimizer's": ([A, without(B, "mpicomp"), C], r"states\[1\]: this is a plain optimizer's state"),
    "no dict": ([A, 3, C], r"states\[1\]: the state is 3, not a dict"),
    "an earlier version's": (
        [A, without(B, "mpicomp", "kinds"), C],
        "rank 1's state lacks the kinds of its residuals; save it again",
    ),
    "kinds of another program": (
        [changed(one, "none", "mpicomp", "kinds", 0, "residual") for one in (A, B, C)],
        "rank 0's state is damaged",
    ),
    "few aggregators": ([without(A, "mpicomp", "aggregators", 0), B, C], "rank 0's state lacks the kinds"),
    "an aggregator": ([A, changed(B, 7, "mpicomp", "aggregators", 1), C], "bucket 1: a rank's state of it is damaged"),
    "an aggregator's step": (
        [A, changed(B, 7, "mpicomp", "aggregators", 1, "step"), C],
        "bucket 1: ranks 0 and 1 differ in step",
    ),
    "entries": ([A, without(B, "mpicomp", "rounds"), C], "ranks 0 and 1 have aggregators, .* in their states"),
    "masters": ([A, changed(B, {"0.bias": 1}, "mpicomp", "rounds", "masters"), C], "ranks 0 and 1 have .* in rounds"),
}


@pytest.mark.parametrize(("states", "told"), REFUSED.values(), ids=REFUSED)
def test_states_that_do_not_belong_together_are_told(states: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        redistribute_states(states, 2)
    assert str(caught.value).isprintable()


def test_states_are_taken_between_synchronizations_only() -> None:
    def work(comm: Communicator) -> list[State]:
        model = copy.deepcopy(MODEL)
        optimizer = wrap(model, Marsit(7), comm, synchronize="updates", local_steps=3)
        train(model, optimizer, comm, range(4))
        middle = copy.deepcopy(optimizer.state_dict())
        optimizer.synchronize()
        return [middle, optimizer.state_dict()]

    middle, after = zip(*run_local(3, work), strict=True)
    with pytest.raises(
        ValueError, match=r"rank 0's state .* in the middle of local steps \(1 after .*: save after opt"
    ):
        redistribute_states(middle, 2)
    assert len(redistribute_states(after, 2)) == 2


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="not from 3 to 0"):
        redistribute_states(ADAM.states, 0)
