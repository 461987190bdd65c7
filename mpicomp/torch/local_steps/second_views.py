"""Second views of the model in an optimizer's state, which local updates leave different on each rank.

An average of the weights (EMA, ASGD's "ax"), lookahead's slow weights and the "z" of schedule-free optimizers follow
this rank's own parameters, and users evaluate or save them in place of the model. Only the parameters are averaged.

They are found by trial: a copy of the optimizer steps with small parameters. State that depends on these without any
gradient is no momentum, and state that also depends on gradients is no copy of the first weights. Coupled weight decay
of an unknown option's name lets momentum depend on both, but moves the parameter without any gradient too.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives.caller_warning import warn_caller

_STEPS = 12
"""Steps of a trial: lookahead moves its slow weights in every 5th to 10th."""
_LONGEST = 4
"""Elements of a trial's parameter along each dimension."""
_NEAR = 0.05
"""Relative distance of an average from its parameter, which has moved little, and of momentum from no parameter."""
_KNOWN = ("state", "param_groups", "defaults")
"""Attributes that every optimizer has."""
_FIXED = {"lr": 0.05, "weight_decay": 0.0, "wd": 0.0}
"""Options of a trial: the first rate may be 0 now, and with weight decay momentum depends on the parameter too."""


@dataclass(frozen=True)
class SecondViews:
    """Keys of second views; not `certain` where weight decay explains them as well."""

    keys: Sequence[str] = ()
    certain: bool = True


def refuse_second_views(optimizer: torch.optim.Optimizer, here: str) -> None:
    """Raise ValueError if an optimizer has second views of the model, and warn if it may have some; not collective."""
    found = second_views(optimizer)
    if found.keys:
        text = (
            f"{type(optimizer).__name__} has a second view of the model, {', '.join(found.keys)}, which follows this "
            "rank's own parameters and is not averaged, so that a model that is evaluated or saved from it would "
            'differ between the ranks; pass synchronize="gradients"'
        )
        if found.certain:
            raise ValueError(text)
        warn_caller(f"{here}: {text}")


def second_views(optimizer: torch.optim.Optimizer) -> SecondViews:
    """Return the second views in an optimizer's state and attributes; none if copies of it cannot step alone."""
    for seeded in (False, True):
        with suppress(Exception):  # of any optimizer, such as one that needs a closure
            still, shifted, moved = (_trial(optimizer, *how, seeded) for how in ((0, 0), (1, 0), (0, 1)))
            found = {
                key
                for key in still.tensors.keys() & shifted.tensors.keys() & moved.tensors.keys()
                if not any(_are_equal(still.tensors[key], other.tensors[key]) for other in (shifted, moved))
            }
            certain = shifted.stands or not found.isdisjoint(shifted.near)
            return SecondViews(sorted({name for name, _ in found}), certain)
    return SecondViews()


@dataclass(frozen=True)
class _Trial:
    """Tensors after the steps that are as long as a group's parameter, by name and number.

    Those that are `near` hold almost the parameter; `stands`: no parameter has moved.
    """

    tensors: Mapping[tuple[str, int], Tensor]
    near: Collection[tuple[str, int]]
    stands: bool


def _trial(optimizer: torch.optim.Optimizer, shift: float, slope: float, seeded: bool) -> _Trial:
    """Step a copy with one small parameter of each group.

    With `seeded` the state is there at the start, with zeros: some constructors make it.
    """
    firsts = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    small = [_small_like(one, shift) for one in firsts]
    clone, state = _clone(optimizer, firsts, small)
    for first, one in zip(firsts, small, strict=True) if seeded else ():
        for key, value in optimizer.state.get(first, {}).items():
            is_like = torch.is_tensor(value) and value.shape == first.shape
            state[one][key] = torch.zeros_like(one) if is_like else copy.deepcopy(value)
    before = [one.detach().clone() for one in small]
    with torch.random.fork_rng([one.device.index for one in small if one.is_cuda]):  # the same noise in each trial
        for _ in range(_STEPS):
            for one in small:
                one.grad = one.detach().sin() * slope
            type(clone).step(clone)  # as schedulers give an object another `step`
    found = _long_tensors(clone, state, small)
    near = {place for place, tensor in found.items() if any(_is_near(tensor, one) for one in small)}
    return _Trial(found, near, all(map(torch.equal, small, before)))


def _clone(
    optimizer: torch.optim.Optimizer, firsts: Sequence[Tensor], small: Sequence[Tensor]
) -> tuple[torch.optim.Optimizer, dict[Tensor, Any]]:
    """Return a copy whose groups have a small parameter each, and its state, which is empty.

    `copy.copy` leaves out all attributes but state and groups. Tensors of attributes that are shaped as the first
    parameter of a group, or as all parameters in one vector, are small too, and zero; a method of the optimizer becomes
    one of the clone.
    """
    every = [one for group in optimizer.param_groups for one in group["params"]]
    clone, state = object.__new__(type(optimizer)), defaultdict[Tensor, Any](dict)
    memo: dict[int, Any] = {id(one): one for one in every} | {id(optimizer.state): state, id(optimizer): clone}
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _KNOWN}
    # of one shape the first counts; an attribute may also be a vector of all parameters
    of_shape = {torch.Size([sum(one.numel() for one in every)]): torch.cat([one.detach().flatten() for one in small])}
    of_shape |= {one.shape: little.detach() for one, little in zip(reversed(firsts), reversed(small), strict=True)}
    memo |= {
        id(one): torch.zeros_like(of_shape[one.shape], dtype=one.dtype)
        for one in _tensors(attributes)
        if one.shape in of_shape
    }
    memo |= {id(one): little for one, little in zip(firsts, small, strict=True)}
    places = {next(place for place, one in enumerate(every) if one is first) for first in firsts}
    for name, value in attributes.items():
        if isinstance(value, list) and len(value) == len(every):  # one entry for each parameter
            attributes[name] = [entry for place, entry in enumerate(value) if place in places]
    clone.__dict__.update(copy.deepcopy(vars(optimizer) | attributes, memo))
    clone.__dict__.update({f"_optimizer_step_{side}_hooks": OrderedDict() for side in ("pre", "post")})  # the caller's
    for group, one in zip([group for group in clone.param_groups if group["params"]], small, strict=True):
        group["params"] = [one]
        group.update({key: value for key, value in _FIXED.items() if key in group})
    return clone, state


def _long_tensors(
    clone: torch.optim.Optimizer, state: Mapping[Tensor, Any], small: Sequence[Tensor]
) -> dict[tuple[str, int], Tensor]:
    """Return copies of the tensors in state and attributes that are as long as a parameter, or as all in one."""
    found = {
        (repr(key), number): now.clone()
        for number, one in enumerate(small)
        for key, now in state[one].items()
        if torch.is_tensor(now) and now.numel() == one.numel()
    }
    own, lengths = {one.data_ptr() for one in small}, {one.numel() for one in small}
    lengths.add(sum(one.numel() for one in small))
    for name, value in vars(clone).items():
        long = [one for one in _tensors(value) if one.numel() in lengths and one.data_ptr() not in own]
        found |= {(f".{name}", number): one.clone() for number, one in enumerate(long) if name not in _KNOWN}
    return found


def _tensors(value: object) -> Iterator[Tensor]:
    """Walk over the tensors in lists, tuples and dictionaries."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    # NaN is equal to NaN: without gradients some optimizers divide 0 by 0
    return torch.equal(one.float().nan_to_num(), other.float().nan_to_num())


def _is_near(tensor: Tensor, parameter: Tensor) -> bool:
    return tensor.numel() == parameter.numel() and torch.allclose(
        tensor.flatten().float(), parameter.detach().flatten().float(), rtol=_NEAR
    )


def _small_like(parameter: Tensor, shift: float) -> torch.nn.Parameter:
    shape = [min(n, _LONGEST) for n in parameter.shape]
    values = torch.linspace(1, 2, math.prod(shape), dtype=torch.float32, device="cpu") + shift
    return torch.nn.Parameter(values.view(shape).to(parameter.device, parameter.dtype))
