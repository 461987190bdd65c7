"""Second views of the model in an optimizer's state, which local updates leave different on each rank.

An average of the weights (EMA, ASGD's "ax"), lookahead's slow weights and the "z" of schedule-free optimizers follow
this rank's own parameters, and users evaluate or save them in place of the model. Only the parameters are averaged.

They are found by trial: a copy of the optimizer steps with small parameters. State that depends on these without any
gradient is no momentum, and state that also depends on gradients is no copy of the first weights.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from collectives.caller_warning import warn_caller

_STEPS = 12
"""Steps of a trial: lookahead moves its slow weights in every 5th to 10th."""
_LONGEST = 4
"""Elements of a trial's parameter along each dimension."""
_FIXED = {"lr": 0.05, "weight_decay": 0.0, "wd": 0.0}
"""Options of a trial: the first rate may be 0 now, and with weight decay momentum depends on the parameter too."""


def warn_of_second_views(optimizer: torch.optim.Optimizer, here: str) -> None:
    """Warn if the state of an optimizer has second views of the model; equal on all ranks, and not collective."""
    keys = second_views(optimizer)
    if keys:
        warn_caller(
            f"{here}: the state of {type(optimizer).__name__} has a second view of the model, {', '.join(keys)}, which "
            "follows this rank's own parameters and is not averaged, so that a model that is evaluated or saved from "
            'it differs between the ranks; pass synchronize="gradients"'
        )


def second_views(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the keys of the second views in an optimizer's state, and none if copies of it cannot step alone."""
    for seeded in (False, True):
        with suppress(Exception):  # of any optimizer, such as one that needs a closure
            trials = [_trial(optimizer, shift, slope, seeded) for shift, slope in ((0, 0), (1, 0), (0, 1))]
            found = {
                repr(key)
                for still, shifted, moved in zip(*trials, strict=True)
                for key, tensor in still.items()
                if not (_are_equal(tensor, shifted[key]) or _are_equal(tensor, moved[key]))
            }
            return sorted(found)
    return []


def _trial(optimizer: torch.optim.Optimizer, shift: float, slope: float, seeded: bool) -> list[dict[str, Tensor]]:
    """Return the state of each group's parameter, of its length, after steps of a copy with these values.

    With `seeded` the state is there at the start, with zeros: some constructors make it.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    kept = {id(one): one for group in groups for one in group["params"]}
    clone, state = object.__new__(type(optimizer)), defaultdict[Tensor, Any](dict)
    # `copy.copy` leaves out all attributes but state and groups; a method of the optimizer becomes one of the clone
    memo: dict[int, Any] = kept | {id(optimizer.state): state, id(optimizer): clone}
    clone.__dict__.update(copy.deepcopy(vars(optimizer), memo))
    clone.__dict__.update({f"_optimizer_step_{side}_hooks": OrderedDict() for side in ("pre", "post")})  # the caller's
    small = []
    for group in clone.param_groups:
        if group["params"]:
            parameter, one = group["params"][0], _small_like(group["params"][0], shift)
            group["params"] = [one]
            small.append(one)
            for key, value in optimizer.state.get(parameter, {}).items() if seeded else ():
                is_like = torch.is_tensor(value) and value.shape == parameter.shape
                state[one][key] = torch.zeros_like(one) if is_like else copy.deepcopy(value)
        group.update({key: value for key, value in _FIXED.items() if key in group})
    with torch.random.fork_rng([one.device.index for one in small if one.is_cuda]):  # the same noise in each trial
        for _ in range(_STEPS):
            for one in small:
                one.grad = one.detach().sin() * slope
            type(clone).step(clone)  # as schedulers give an object another `step`
    return [
        {key: now.clone() for key, now in state[one].items() if torch.is_tensor(now) and now.numel() == one.numel()}
        for one in small
    ]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    # NaN is equal to NaN: without gradients some optimizers divide 0 by 0
    return torch.equal(one.float().nan_to_num(), other.float().nan_to_num())


def _small_like(parameter: Tensor, shift: float) -> torch.nn.Parameter:
    shape = [min(n, _LONGEST) for n in parameter.shape]
    values = torch.linspace(1, 2, math.prod(shape), dtype=torch.float32, device="cpu") + shift
    return torch.nn.Parameter(values.view(shape).to(parameter.device, parameter.dtype))
