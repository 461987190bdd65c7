"""The outer optimizer of local steps: it moves the common model, and the aggregated update d is its gradient.

    b <- mu b + d;   x <- x - eta (d + mu b)        outer=(eta, mu): torch's SGD with Nesterov momentum

Since d is equal on all ranks, so are b and x: the outer optimizer communicates nothing, and its state is the same in
all ranks' states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from collectives.quoting import one_line, shown
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.parameters import LISTS, NamedParameter
from mpicomp.torch.state.schema import OUTER, State, cannot_load

Outer: TypeAlias = tuple[float, float] | torch.optim.Optimizer | Callable[[list[Tensor]], torch.optim.Optimizer]
"""Step size and momentum, an optimizer of the model's parameters, or a function of parameters that returns one."""


def outer_optimizer(outer: Outer | None, members: Sequence[NamedParameter]) -> torch.optim.Optimizer | None:
    """Return the optimizer that `outer` stands for, over the parameters of `members`; None for None.

    Raises
    ------
    TypeError, ValueError
        `outer` is something else or out of range, or its optimizer lacks a parameter or needs a closure.
    """
    if outer is None:
        return None
    parameters = [member.parameter for member in members]
    if isinstance(outer, tuple | list):
        eta, mu = _numbers(outer)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=eta, momentum=mu)
        for group in optimizer.param_groups:
            group["nesterov"] = True  # the constructor refuses it without momentum, which a schedule may add
        return optimizer
    optimizer = outer if isinstance(outer, torch.optim.Optimizer) else _made(outer, parameters)
    kind = type(optimizer).__name__
    if getattr(optimizer, "synchronizes_ranks", False) or hasattr(optimizer, "synchronizations"):
        raise TypeError(f"outer is a {kind}, which synchronizes the ranks itself; pass a plain torch optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("outer is LBFGS, which needs a closure; pass an optimizer that steps without one")
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    lacking = [member.name for member in members if member.parameter not in held]
    if lacking:
        raise ValueError(
            f"the outer {kind} lacks {len(lacking)} of {len(members)} trained parameters, the first of which is "
            f"{lacking[0]!r}; make it of the same parameters as the optimizer"
        )
    return optimizer


def outer_text(outer: Outer | None) -> str:
    """Return `outer` as ranks compare it; classes and options of optimizers are compared too."""
    if outer is None or isinstance(outer, tuple | list):
        return repr(outer if outer is None else tuple(map(float, outer)))
    return "an optimizer"


def _numbers(outer: tuple[object, ...] | list[object]) -> tuple[float, float]:
    if len(outer) != 2 or not all(isinstance(one, Real) and not isinstance(one, bool) for one in outer):
        raise ValueError(f"outer is {shown(outer)}; pass two numbers, outer=(eta, mu), or a torch optimizer")
    eta, mu = (float(one) for one in outer)  # type: ignore[arg-type]
    if not (eta > 0 and isfinite(eta)):
        raise ValueError(f"outer has a step size eta of {shown(outer[0])}; choose a positive number, such as 0.7")
    if not 0 <= mu < 1:
        raise ValueError(f"outer has a momentum mu of {shown(outer[1])}; choose one from 0 up to, not including, 1")
    return eta, mu


def _made(outer: object, parameters: list[Tensor]) -> torch.optim.Optimizer:
    cure = "pass outer=(eta, mu), a torch optimizer, or a function of parameters that returns one"
    if not callable(outer) or isinstance(outer, torch.nn.Module):
        raise TypeError(f"outer is of type {type(outer).__name__}; {cure}")
    try:
        made = outer(parameters)
    except Exception as error:  # of the user's function
        raise ValueError(
            f"outer cannot make an optimizer of the parameters ({type(error).__name__}: {one_line(error)}); {cure}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer returned {shown(made)}, which is no optimizer; {cure}")
    return made


class OuterStep:
    """Moves the common model, bucket by bucket.

    `members` are the parameters that `optimizer` holds, under their names; those of 16 bits are masters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[NamedParameter]) -> None:
        self.optimizer = optimizer
        self._names = {member.parameter: member.name for member in members}
        self._added: list[NamedParameter] = []  # that this object has added, and that have not joined yet

    def hold(self, joining: Sequence[NamedParameter]) -> None:
        """Let the optimizer hold parameters that join, and none that it was given by an earlier call and that do not.

        Raises
        ------
        ValueError
            The optimizer has several groups, and lacks a parameter.
        """
        groups = self.optimizer.param_groups
        here = {member.parameter for member in joining}
        gone = {member.parameter for member in self._added} - here
        held = {parameter for group in groups for parameter in group["params"]} - gone
        lacking = [member for member in joining if member.parameter not in held]
        if not lacking and not gone:
            return
        if lacking and len(groups) > 1:
            raise ValueError(
                f"the outer {type(self.optimizer).__name__} has several parameter groups, none of which has "
                f"{lacking[0].name!r}; add it to the outer optimizer too, by optimizer.outer.add_param_group"
            )
        kept = [parameter for parameter in groups[0]["params"] if parameter not in gone]
        groups[0]["params"] = kept + [member.parameter for member in lacking]
        self._added = [member for member in self._added if member.parameter in here] + lacking
        self._names.update({member.parameter: member.name for member in joining})

    def join(self, members: Sequence[NamedParameter]) -> None:
        """Keep these of the parameters that join for good."""
        joined = {member.name for member in members}
        self._added = [member for member in self._added if member.name not in joined]

    @property
    def is_plain(self) -> bool:
        """Flag: the step is x <- x - d now, which needs no vector d."""
        return type(self.optimizer) is torch.optim.SGD and all(
            float(group["lr"]) == 1 and not (group["momentum"] or group["weight_decay"] or group["maximize"])
            for group in self.optimizer.param_groups
        )

    @torch.no_grad()
    def move(self, reducer: BucketReducer, frozen: Collection[Tensor] = ()) -> None:
        """Move a bucket's parameters, which hold the common model, by the reducer's mean.

        The momentum of `frozen` ones rests; their values, which a plain step moves, are the caller's to restore.
        """
        if self.is_plain:
            reducer.subtract_mean()
            with only(self.optimizer, ()):
                self.optimizer.step()  # which schedulers look for
            return
        gradients = [parameter.grad for parameter in reducer.parameters]
        try:
            for parameter, mean in zip(reducer.parameters, reducer.mean_views, strict=True):
                parameter.grad = mean
            with only(self.optimizer, set(reducer.parameters).difference(frozen)):
                self.optimizer.step()
        finally:
            for parameter, gradient in zip(reducer.parameters, gradients, strict=True):
                parameter.grad = gradient

    def state(self) -> State:
        """Return a copy of the optimizer's state, by the names of its parameters."""
        found, names = self.optimizer.state_dict(), self._held_names()
        flat = [name for of_group in names for name in of_group]
        groups = [
            {**{key: value for key, value in group.items() if key not in LISTS}, "names": of_group}
            for group, of_group in zip(found["param_groups"], names, strict=True)
        ]
        by_name = {flat[place]: value for place, value in found["state"].items()}
        return copy.deepcopy({"class": type(self.optimizer).__name__, "groups": groups, "state": by_name})

    def check(self, state: State, optional: Collection[str] = ()) -> None:
        """Raise ValueError unless the optimizer can load a state, which may lack the parameters named in `optional`."""
        OUTER.check(state)
        kind, names = type(self.optimizer).__name__, self._held_names()
        found = [group.get("names") if isinstance(group, dict) else None for group in state["groups"]]
        saved = [sorted(map(str, one)) if isinstance(one, list) else None for one in found]
        lacking = set(optional).difference(*filter(None, saved))
        expected = [sorted(set(of_group) - lacking) for of_group in names]
        if (state["class"], saved) != (kind, expected):
            raise ValueError(
                f"the state's outer optimizer is {shown(state['class'])} over {shown(saved)}, and here it is {kind} "
                f"over {shown(expected)}; build it with the same options and model"
            )
        before = self.optimizer.state_dict()
        try:
            self.load(state)
        finally:
            self.optimizer.load_state_dict(before)

    def load(self, state: State) -> None:
        """Load a copy of a state; raise ValueError if the optimizer does not take it."""
        names = self._held_names()
        places = {name: place for place, name in enumerate(name for of_group in names for name in of_group)}
        try:
            groups = [
                {**{key: value for key, value in group.items() if key != "names"}, "params": [places[n] for n in mine]}
                for group, mine in zip(state["groups"], names, strict=True)
            ]
            by_place = {places[name]: dict(value) for name, value in state["state"].items()}
            self.optimizer.load_state_dict(copy.deepcopy({"state": by_place, "param_groups": groups}))
        except Exception as error:  # torch checks little, and other optimizers have rules of their own
            raise cannot_load(f"the outer {type(self.optimizer).__name__}", error) from error
        for parameter, of_one in self.optimizer.state.items():
            momentum = of_one.get("momentum_buffer")
            if isinstance(momentum, Tensor) and momentum.shape != parameter.shape:
                raise ValueError(
                    f"the state's outer momentum of {self._names[parameter]!r} has shape {tuple(momentum.shape)}, not "
                    f"{tuple(parameter.shape)}; load an earlier one"
                )

    def _held_names(self) -> list[list[str]]:
        """Return the names of each group's parameters; those of others are their places."""
        return [
            [self._names.get(one, f"group {g}, parameter {i}") for i, one in enumerate(group["params"])]
            for g, group in enumerate(self.optimizer.param_groups)
        ]


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let the optimizer hold only these of its parameters."""
    chosen = set(parameters)
    kept = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in chosen]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params
