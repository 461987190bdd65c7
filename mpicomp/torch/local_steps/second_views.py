"""Second views of the model in an optimizer, which local updates would leave different on each rank.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import current_thread, main_thread
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collectives.caller_warning import warn_caller
from mpicomp.torch.parameters import NARROW

_STEPS = 12
"""Steps of a trial: lookahead moves its slow weights in every 5th to 10th."""
_LONGEST = 4
"""Elements of a trial's parameter along each dimension."""
_MOST_GROUPS = 8
"""Groups in a trial: others with equal options have equal state."""
_NEAR = 0.05
"""Relative distance of an average from its parameter, which has moved little, and of momentum from no parameter."""
_KNOWN = ("state", "param_groups", "defaults")
"""Attributes that every optimizer has."""
_FIXED = {"lr": 0.05, "weight_decay": 0.0, "wd": 0.0}
"""Options of a trial: the first rate may be 0 now, and with weight decay momentum depends on the parameter too."""
_SHARED = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
_HOOKS = "_optimizer_"
"""Beginning of the names of attributes that hold the caller's hooks."""
_DICTS = (dict, OrderedDict, defaultdict)


class SecondViews(NamedTuple):
    """Keys of second views; not `certain` where they may be something else."""

    keys: Sequence[str] = ()
    certain: bool = False


def refuse_second_views(optimizer: torch.optim.Optimizer, here: str) -> None:
    """Raise ValueError if an optimizer has second views of the model, and warn if it may have some; not collective."""
    found = second_views(optimizer)
    if found.certain:
        raise ValueError(_text(optimizer, found))
    if found.keys:
        warn_caller(f"{here}: {_text(optimizer, found)}")


def warn_of_late_views(optimizer: torch.optim.Optimizer, here: str) -> None:
    """Warn of second views after the first step: some copies cannot step before."""
    found = second_views(optimizer)
    if found.certain:
        warn_caller(f"{here}: {_text(optimizer, found)}")


def _text(optimizer: torch.optim.Optimizer, found: SecondViews) -> str:
    return (
        f"{type(optimizer).__name__} has a second view of the model, {', '.join(found.keys)}, which follows this "
        "rank's own parameters and is not averaged, so that a model that is evaluated or saved from it would differ "
        'between the ranks; pass synchronize="gradients"'
    )


def second_views(optimizer: torch.optim.Optimizer) -> SecondViews:
    """Return the second views in an optimizer's state and attributes; none if copies of it cannot step alone."""
    for seeded in (False, True):
        with suppress(Exception):  # of any optimizer, such as one that needs a closure
            still, shifted, moved = (_Trial(optimizer, *how, seeded) for how in ((0, 0), (1, 0), (0, 1)))
            found = [
                key
                for key in still.tensors.keys() & shifted.tensors.keys() & moved.tensors.keys()
                if not any(_are_equal(still.tensors[key], other.tensors[key]) for other in (shifted, moved))
            ]
            # one element may be a norm of the parameter, and a copy of the last step's serves the optimizer alone
            certain = any(
                shifted.tensors[key].numel() > 1
                and (shifted.stands or shifted.is_near(key))
                and key not in moved.of_last_step
                for key in found
            )
            return SecondViews(sorted({name for name, _ in found}), certain)
    return SecondViews()


class _Trial:
    """Steps of a copy with one small parameter of each group.

    With `seeded` the state is there at the start, with zeros: some constructors make it.

    Attributes
    ----------
    tensors : dict
        Those in state and attributes that are as long as a parameter, or as all in one, by name and number.
    of_last_step : set
        Keys of the tensors that are a parameter as it was before the last step.
    stands : bool
        Flag: no parameter has moved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shift: float, slope: float, seeded: bool) -> None:
        largest = [max(group["params"], key=torch.numel) for group in _groups(optimizer)]
        self._small = [_small_like(one, shift) for one in largest]
        copied = _Copy(optimizer, largest, self._small)
        for first, one in zip(largest, self._small, strict=True) if seeded else ():
            for theirs, ours in copied.states:
                for key, value in theirs.get(first, {}).items():
                    is_like = torch.is_tensor(value) and value.shape == first.shape
                    ours[one][key] = torch.zeros_like(one) if is_like else copied.of(value)
        before = [one.detach().clone() for one in self._small]
        clone = copied.optimizer
        if callable(train := getattr(clone, "train", None)):  # a schedule-free optimizer steps in this mode alone
            train()
        step = type(clone).step  # as schedulers give an object another `step`
        if getattr(step, "hooked", False):  # by PyTorch, for hooks of all optimizers
            step = step.__wrapped__
        copies: list[set[tuple[str, int]]] = []
        # equal noise in trials; threads share the generator, and another may draw from it now
        alone, drawn = current_thread() is main_thread(), torch.get_rng_state()
        with torch.random.fork_rng([one.device.index for one in self._small if one.is_cuda], enabled=alone):
            for left in reversed(range(_STEPS)):
                last = [one.detach().clone() for one in self._small]
                for one in self._small:
                    one.grad = one.detach().sin() * slope
                step(clone)
                if left < 2:  # lookahead's slow weights are those of one step
                    self.tensors = self._long_tensors(copied)
                    found = self.tensors.items()
                    copies.append({key for key, one in found if any(_is_copy(one, other) for other in last)})
        if not alone and not torch.equal(drawn, torch.get_rng_state()):
            raise RuntimeError("the steps may draw random numbers, which differ between trials")
        self.of_last_step = set.intersection(*copies)
        self.stands = all(map(torch.equal, self._small, before))

    def is_near(self, key: tuple[str, int]) -> bool:
        """Return True if one of the `tensors` almost is a parameter."""
        tensor = self.tensors[key].flatten().float()
        same = [one.detach().flatten().float() for one in self._small if one.numel() == tensor.numel()]
        return any(torch.allclose(tensor, one, rtol=_NEAR) for one in same)

    def _long_tensors(self, copied: _Copy) -> dict[tuple[str, int], Tensor]:
        found = {
            (repr(key), number): now.clone()
            for number, one in enumerate(self._small)
            for _, state in copied.states
            for key, now in state[one].items()
            if torch.is_tensor(now) and now.numel() == one.numel()
        }
        own, lengths = {one.data_ptr() for one in self._small}, {one.numel() for one in self._small}
        lengths.add(sum(one.numel() for one in self._small))
        for name, value in vars(copied.optimizer).items():
            long = [one for one in _tensors(value) if one.numel() in lengths and one.data_ptr() not in own]
            found |= {(f".{name}", number): one.clone() for number, one in enumerate(long) if name not in _KNOWN}
        return found


@dataclass
class _Copy:
    """Copy of an optimizer whose groups have a small parameter each, and of the optimizers that it contains.

    Nothing else is copied but containers: an object that a step might change is an error, and no trial is made.
    Tensors are small too, and zero. Other parameters are left out. A method of the optimizer becomes one of the copy.

    Attributes
    ----------
    states : list
        Of each optimizer its state and that of its copy, which is empty.
    """

    source: torch.optim.Optimizer
    largest: Sequence[Tensor]
    small: Sequence[Tensor]
    states: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._every = [one for group in self.source.param_groups for one in group["params"]]
        whole = torch.cat([one.detach().flatten() for one in self.small])
        # of one shape the first counts; an attribute may also be a vector of all parameters
        self._like = {torch.Size([sum(one.numel() for one in self._every)]): whole}
        pairs = [*zip(self.largest, self.small, strict=True)]
        self._like |= {one.shape: little.detach() for one, little in reversed(pairs)}
        self._memo: dict[int, Any] = {id(one): little for one, little in pairs}
        self._others = {id(one) for one in self._every} - self._memo.keys()
        self._places = [place for place, one in enumerate(self._every) if any(one is other for other in self.largest)]
        self.optimizer = self.of(self.source)

    def of(self, value: Any) -> Any:
        """Return the copy of a value; TypeError if it is, or contains, an object of another kind."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if value is None or isinstance(value, _SHARED):
            return value
        if isinstance(value, FunctionType) and not value.__closure__:
            return value
        if isinstance(value, BuiltinFunctionType) and getattr(torch, value.__name__, None) is value:
            return value
        if id(value) in self._others:
            raise TypeError("a parameter without a trial is not copied")
        made: Any
        if torch.is_tensor(value):
            like = self._like.get(value.shape, value[tuple(slice(_LONGEST) for _ in value.shape)])
            made = torch.zeros_like(like, dtype=value.dtype) if value.numel() > 1 else value.detach().clone()
        elif isinstance(value, torch.optim.Optimizer):
            made = self._of_optimizer(value)
        elif isinstance(value, MethodType) and id(value.__self__) in self._memo:
            made = MethodType(value.__func__, self._memo[id(value.__self__)])
        elif type(value) in _DICTS:
            made = copy.copy(value)
            made.clear()
            known = {key: entry for key, entry in value.items() if id(key) not in self._others}
            made.update({self.of(key): self.of(entry) for key, entry in known.items()})
        elif type(value) in (list, tuple, set, frozenset):
            made = type(value)(map(self.of, self._entries(value)))
        else:
            raise TypeError(f"{type(value).__name__} is not copied")
        self._memo[id(value)] = made
        return made

    def _entries(self, values: Any) -> Sequence[Any]:
        """Return the entries of a container but for those of other parameters, also where each has a tensor."""
        is_whole = isinstance(values, list) and len(values) == len(self._every)
        if is_whole and all(one is None or torch.is_tensor(one) for one in values):
            return [values[place] for place in self._places]
        return [one for one in values if id(one) not in self._others]

    def _of_optimizer(self, source: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if hasattr(type(source), "__del__"):  # it would free resources of the caller's
            raise TypeError(f"{type(source).__name__} is not copied")
        made: torch.optim.Optimizer = object.__new__(type(source))
        self._memo[id(source)] = made
        if id(source.state) not in self._memo:
            self._memo[id(source.state)] = state = defaultdict[Any, Any](dict)
            self.states.append((source.state, state))
        groups = self._memo.get(id(source.param_groups))
        if groups is None:
            groups = []
            for group in _groups(source):
                options = {key: self.of(value) for key, value in group.items() if key != "params"}
                one = next(one for one in self.largest if any(one is other for other in group["params"]))
                fixed = {
                    key: torch.full_like(group[key], value) if torch.is_tensor(group[key]) else value
                    for key, value in _FIXED.items()
                    if key in group
                }
                groups.append(options | fixed | {"params": [self._memo[id(one)]]})
            self._memo[id(source.param_groups)] = groups
        for name, value in vars(source).items():
            if name != "step":  # a scheduler's
                made.__dict__[name] = OrderedDict() if name.startswith(_HOOKS) else self.of(value)
        return made


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of trials: those with parameters, of many one for each kind of options."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    if len(groups) <= _MOST_GROUPS:
        return groups
    kinds = {str({key: group[key] for key in group if key not in ("params", *_FIXED)}): group for group in groups}
    return [*kinds.values()][:_MOST_GROUPS]


def _tensors(value: object) -> Iterator[Tensor]:
    """Walk over the tensors in lists, tuples and dictionaries."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)


def _is_copy(tensor: Tensor, parameter: Tensor) -> bool:
    return tensor.numel() == parameter.numel() and torch.equal(tensor.flatten(), parameter.flatten())


def _are_equal(one: Tensor, other: Tensor) -> bool:
    # NaN is equal to NaN: without gradients some optimizers divide 0 by 0
    return torch.equal(one.float().nan_to_num(), other.float().nan_to_num())


def _small_like(parameter: Tensor, shift: float) -> torch.nn.Parameter:
    shape = [min(n, _LONGEST) for n in parameter.shape]
    values = torch.linspace(1, 2, math.prod(shape), dtype=torch.float32, device="cpu") + shift
    # 16-bit parameters have float32 masters, which the optimizer will hold
    kind = torch.float32 if parameter.dtype in NARROW else parameter.dtype
    return torch.nn.Parameter(values.view(shape).to(parameter.device, kind))
