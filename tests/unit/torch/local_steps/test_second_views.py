"""Second views of the model in an optimizer's state: found in any optimizer, which the search leaves as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpicomp.torch.local_steps.second_views import refuse_second_views, second_views

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Averaging(torch.optim.SGD):
    """SGD with a running mean of the weights, made in the first step."""

    def __init__(self, params: Any, start: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__(params, lr=0.0, momentum=0.9, weight_decay=0.1)
        self.start, self.steps = start, [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps[0] += 1
        for one in self.param_groups[0]["params"]:
            mean = self.state[one].setdefault("ema", self.start(one))
            mean.lerp_(one.view_as(mean), 0.1)


class AveragingFromTheStart(torch.optim.SGD):
    """The same, made in the constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for one in self.param_groups[0]["params"]:
            self.state[one]["ema"] = one.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for one in self.param_groups[0]["params"]:
            self.state[one]["ema"].lerp_(one, 0.1)


class AveragingInAttributes(torch.optim.SGD):
    """The same in an attribute, a list for all groups or a dictionary, made in the constructor or in the first step."""

    def __init__(self, params: Any, at_once: bool, by_parameter: bool) -> None:
        super().__init__([{"params": [one]} for one in params], lr=0.1)
        self.by_parameter = by_parameter
        self.means = self._copies() if at_once else None

    def _copies(self) -> Any:
        every = [one for group in self.param_groups for one in group["params"]]
        copies = [one.detach().clone() for one in every]
        return dict(zip(every, copies, strict=True)) if self.by_parameter else copies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.means = self.means or self._copies()
        for place, one in enumerate(one for group in self.param_groups for one in group["params"]):
            self.means[one if self.by_parameter else place].lerp_(one, 0.1)


class FlatAverage(torch.optim.SGD):
    """The same in a vector of all parameters."""

    mean: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        flat = torch.cat([one.flatten() for group in self.param_groups for one in group["params"]])
        self.mean = flat if self.mean is None else self.mean.lerp(flat, 0.1)


class LookaheadInBase(torch.optim.Optimizer):
    """Lookahead whose slow weights are in the state of the other optimizer, which has groups in common with it."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.steps = base, base.param_groups, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.steps += 1
        for one in self.param_groups[0]["params"]:
            slow = self.base.state[one].setdefault("slow", one.clone())
            if self.steps % 6 == 0:
                one.copy_(slow.lerp_(one, 0.5))


class KeepsNorm(torch.optim.Optimizer):
    """Optimizer that keeps a norm of each parameter, as Adafactor and LAMB do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            self.state[one]["norm"] = one.norm()
            one.sub_(one.grad, alpha=0.1)


class CoupledDecay(torch.optim.SGD):
    """SGD with momentum, in an attribute, whose weight decay has a name of its own."""

    def __init__(self, params: Any, l2: float = 0.1) -> None:
        super().__init__(params, lr=0.1)
        self.l2, self.momenta = l2, [torch.zeros_like(one) for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one, momentum in zip(self.param_groups[0]["params"], self.momenta, strict=True):
            momentum.mul_(0.9).add_(one.grad).add_(one, alpha=self.l2)
            one.sub_(momentum, alpha=0.1)


class Coded(torch.optim.SGD):
    """SGD with momentum in codes with a scale, which is 0 without gradients, so that the codes are NaN."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            momentum = (0.9 * state["codes"] * state["scale"] if state else 0) + one.grad
            state["scale"] = momentum.abs().max() / 100
            state["codes"] = momentum / state["scale"]
            one.sub_(momentum, alpha=0.01)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: z is moved by gradients, and the parameter by both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, 1 / group["k"]).sub_(y.grad, alpha=0.1 * group["lr"])
                z.sub_(y.grad, alpha=group["lr"])


class InTwoKinds(torch.optim.Optimizer):
    """Optimizer that keeps its matrices and its vectors, by attributes of its own, as those with Muon do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        every = self.param_groups[0]["params"]
        self.matrices = [one for one in every if one.ndim > 1]
        self.vectors = {one: 0.1 for one in every if one.ndim < 2}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.matrices:
            one.mul_(0.9)
        for one, rate in self.vectors.items():
            one.sub_(rate)


class KeepsLast(torch.optim.Optimizer):
    """Optimizer that keeps the parameter of the last step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            self.state[one]["last"] = one.clone()
            one.sub_(one.grad, alpha=0.1)


class ScheduleFreeInModes(ScheduleFree):
    """The same, which steps after a call of `train` alone."""

    mode = "eval"

    def train(self) -> None:
        self.mode = "train"

    def step(self, closure: Any = None) -> None:
        if self.mode != "train":
            raise RuntimeError("call train()")
        super().step()


class Lookahead(torch.optim.Optimizer):
    """Lookahead around another optimizer, with which it shares groups and state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.state, self.param_groups, self.steps = base, base.state, base.param_groups, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.steps += 1
        for one in self.param_groups[0]["params"]:
            slow = self.state[one].setdefault("slow", one.clone())
            if self.steps % 6 == 0:
                one.copy_(slow.lerp_(one, 0.5))


class DistanceToStart(torch.optim.Optimizer):
    """Optimizer with a copy of the first weights and sums of gradients, as Prodigy, and with noise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            state.setdefault("p0", one.clone())
            state.setdefault("s", torch.zeros_like(one)).add_(one.grad).add_(torch.randn_like(one))
            one.sub_(state["s"], alpha=0.1)


WITH: dict[str, tuple[Make, str]] = {
    "averaging": (Averaging, "'ema'"),
    "averaging in a flat vector": (lambda found: Averaging(found, start=lambda one: one.flatten().clone()), "'ema'"),
    "averaging from zeros": (lambda found: Averaging(found, start=torch.zeros_like), "'ema'"),
    "from constructor": (AveragingFromTheStart, "'ema'"),
    "asgd": (torch.optim.ASGD, "'ax'"),
    "schedule-free": (ScheduleFree, "'z'"),
    "schedule-free in modes": (ScheduleFreeInModes, "'z'"),
    "lookahead": (lambda found: Lookahead(torch.optim.Adam(found)), "'slow'"),
    "lookahead in the other's state": (lambda found: LookaheadInBase(torch.optim.Adam(found)), "'slow'"),
}
IN_ATTRIBUTES: dict[str, tuple[Make, str]] = {
    f"{'dictionary' if by_parameter else 'list'}, {'constructor' if at_once else 'first step'}": (
        partial(AveragingInAttributes, at_once=at_once, by_parameter=by_parameter),
        ".means",
    )
    for at_once in (False, True)
    for by_parameter in (False, True)
} | {"flat": (lambda found: FlatAverage(found, lr=0.1), ".mean")}
WITHOUT: dict[str, Make] = {
    "sgd": lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9, weight_decay=1.0, nesterov=True),
    "adam": lambda found: torch.optim.Adam(found, amsgrad=True, weight_decay=0.1),
    "tensor lr": lambda found: torch.optim.AdamW(found, lr=torch.tensor(0.1), foreach=False),
    "rmsprop": lambda found: torch.optim.RMSprop(found, momentum=0.9, centered=True),
    "distance to start": DistanceToStart,
    "codes": lambda found: Coded(found, lr=0.1),
    "norm": KeepsNorm,
    "in two kinds": InTwoKinds,
    **{
        name: getattr(torch.optim, name)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "NAdam", "RAdam", "Rprop")
    },
}


def made(make: Make) -> torch.optim.Optimizer:
    """Return an optimizer of two parameters."""
    torch.manual_seed(0)
    return make([nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.zeros(5))])


def stepped(make: Make) -> torch.optim.Optimizer:
    """Return an optimizer that has made a step, if it can without a closure."""
    optimizer = made(make)
    if not isinstance(optimizer, torch.optim.LBFGS):
        for one in optimizer.param_groups[0]["params"]:
            one.grad = torch.randn_like(one)
        getattr(optimizer, "train", bool)()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("at", ["construction", "the second step"])
@pytest.mark.parametrize(("make", "key"), [*WITH.values(), *IN_ATTRIBUTES.values()], ids=[*WITH, *IN_ATTRIBUTES])
def test_a_second_view_of_the_model_is_refused(make: Make, key: str, at: str) -> None:
    optimizer = made(make) if at == "construction" else stepped(make)
    with pytest.raises(ValueError, match=f'a second view of the model, {key}, .*; pass synchronize="gradients"'):
        refuse_second_views(optimizer, "rank 0 of 2")


@pytest.mark.parametrize("make", WITHOUT.values(), ids=WITHOUT)
def test_momentum_and_copies_of_the_first_weights_are_no_second_views(make: Make) -> None:
    assert not second_views(made(make)).keys
    assert not second_views(stepped(make)).keys


@pytest.mark.parametrize(("l2", "kind"), [(0.1, torch.float32), (1e-4, torch.bfloat16)])
def test_an_optimizer_with_coupled_weight_decay_of_an_unknown_name_is_warned_of(l2: float, kind: torch.dtype) -> None:
    optimizer = CoupledDecay([nn.Parameter(torch.ones(7, 3, dtype=kind))], l2)
    with pytest.warns(RuntimeWarning, match="rank 0 of 2: CoupledDecay has a second view of the model, .momenta"):
        refuse_second_views(optimizer, "rank 0 of 2")


def test_a_norm_of_a_parameter_of_one_element_is_no_reason_to_refuse() -> None:
    one, scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(2.0))
    assert not second_views(KeepsNorm([scale, one])).keys
    assert not second_views(KeepsNorm([scale])).certain


def test_the_search_copies_no_object_and_frees_none() -> None:
    class Closes(Averaging):
        def __del__(self) -> None:
            closed.append(self)

    closed, copied = [], []

    class Helper:
        def __deepcopy__(self, memo: Any) -> Any:
            copied.append(self)
            return self

        def hook(self, *arguments: Any) -> None:
            pass

    optimizer, helper = made(Averaging), Helper()
    optimizer.register_step_pre_hook(helper.hook)
    assert second_views(optimizer).certain
    optimizer.helper = helper  # type: ignore[attr-defined]  # whose state a step may change
    assert not second_views(optimizer).keys
    owner = made(Closes)
    assert not second_views(owner).keys
    assert not copied
    assert not closed


@pytest.mark.parametrize("shape", [(7, 3), (3,), (2, 2)])
def test_the_search_changes_no_parameter(shape: tuple[int, ...]) -> None:
    every = [nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    for make in (InTwoKinds, Averaging, partial(AveragingInAttributes, at_once=True, by_parameter=True)):
        second_views(make(every))
    assert all((one == 1).all() for one in every)


def test_ranks_that_are_threads_keep_the_generator_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    forks: list[object] = []
    monkeypatch.setattr(torch, "set_rng_state", forks.append)
    monkeypatch.setattr(torch.random, "set_rng_state", forks.append)
    for make, certain in ((Averaging, True), (DistanceToStart, False)):
        thread = ThreadPoolExecutor(1)
        assert thread.submit(second_views, made(make)).result().certain == certain
        thread.shutdown()
    assert not forks


def test_a_copy_of_the_last_step_is_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match="KeepsLast has a second view of the model, 'last'"):
        refuse_second_views(made(KeepsLast), "rank 0 of 2")


def test_callbacks_of_the_caller_are_not_called() -> None:
    calls: list[int] = []
    for callback in (calls.append, lambda: calls.append(1)):
        optimizer = made(Averaging)
        optimizer.callback = callback  # type: ignore[attr-defined]
        assert not second_views(optimizer).keys
    assert not calls


def test_no_hook_of_all_optimizers_is_called() -> None:
    calls: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *arguments: calls.append(arguments))
    try:
        assert second_views(made(torch.optim.ASGD)).certain
    finally:
        handle.remove()
    assert not calls


def test_of_many_groups_those_are_tried_whose_options_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    class Counts(torch.optim.ASGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(len(self.param_groups))
            return super().step()

    groups = [{"params": [nn.Parameter(torch.ones(3))], "lr": 0.1 / (n + 1), "t0": n // 50} for n in range(100)]
    assert second_views(Counts(groups)).certain
    assert {*steps} == {2}


@pytest.mark.parametrize(
    "make",
    [*(make for make, _ in (*WITH.values(), *IN_ATTRIBUTES.values())), *WITHOUT.values()],
    ids=[*WITH, *IN_ATTRIBUTES, *WITHOUT],
)
def test_the_search_leaves_optimizer_hooks_schedulers_and_random_numbers_as_they_were(make: Make) -> None:
    optimizer, calls = stepped(make), []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append(arguments))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    parameters = [one.detach().clone() for one in optimizer.param_groups[0]["params"]]
    attributes = {key: repr(value) for key, value in vars(optimizer).items() if not key.startswith("_")}
    second_views(optimizer)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], parameters))
    assert {key: repr(value) for key, value in vars(optimizer).items() if not key.startswith("_")} == attributes
    assert torch.equal(torch.get_rng_state(), random)
    assert not calls
    assert scheduler.last_epoch == 0
