"""Adam's two moments of one bucket in flat vectors, the steps that they make, and the rule that freezes the second.

    first steps    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
                   x <- x - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    once frozen    w = 1 / (sqrt(v / (1 - b2^T)) + eps),  0 where v = 0
                   x <- x - lr (m / (1 - b1^t)) w

g is the ranks' mean. Once v is frozen at step T, m is the compressed mean of the ranks' b1 m + (1 - b1) g_rank.
Preconditioned, both have the factor w already, and the last line lacks it.

    v is frozen after step t if   ||v_t||_1 >= 0.96 ||v_(t - d)||_1,   d = 1 / (1 - beta2)

Here v is taken with its bias correction: without it v would always grow at first. Steps before the last one whose
learning rate was higher than that of the step before it do not count, so a warm-up of the learning rate ends first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mpicomp.torch.buckets.bucket_layout import Bucket
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.parameters import NamedParameter, ParameterGroup
from mpicomp.torch.state.schema import FREEZE_RULE, State

Groups: TypeAlias = Sequence[ParameterGroup]
STABLE = 0.96


@dataclass(frozen=True, eq=False)
class Stretch:
    """Members of one parameter group that follow each other: their elements, their places, their parameters."""

    group: int
    part: slice
    members: slice
    parameters: list[Tensor]


def check_group(group: ParameterGroup, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError, with the option's name, if one of the optimizer is out of range; TypeError if it is no number.

    Options are those of its defaults.
    """
    try:
        fine = {name: _CHECKS[name][0](group[name]) for name in optimizer.defaults if name in _CHECKS}
    except (KeyError, TypeError, ValueError):
        given = {name: group.get(name) for name in optimizer.defaults}
        raise TypeError(
            f"the options {given!r:.300} are not all numbers; write {type(optimizer).__name__}(params, lr=0.001)"
        ) from None
    for name, is_fine in fine.items():
        if not is_fine:
            raise ValueError(f"{name} is {group[name]}; it must be {_CHECKS[name][1]}")


# of each option, a condition and its text
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda one: one >= 0, "0 or more"),
    "betas": (lambda both: len(both) == 2 and all(0 <= one < 1 for one in both), "two numbers from 0 to below 1"),
    "momentum": (lambda one: 0 <= one < 1, "a number from 0 to below 1"),
    "orthogonalize": (lambda one: isinstance(one, bool), "True or False"),
    "eps": (lambda one: one > 0, "positive"),
    "weight_decay": (lambda one: one >= 0, "0 or more"),
}


@dataclass(eq=False)
class Cohort:
    """Parameters that have joined at one step, after `joined` other ones; their v is `frozen` by one rule."""

    rule: VarianceFreeze
    joined: int = 0
    frozen: bool = False


class AdamMoments:
    """Moments of a bucket, and the moves of its parameters, whose groups have the numbers in `group_of`.

    Attributes
    ----------
    bucket
        The bucket, which has the names of the parameters.
    m
        First moment; once v is frozen and if preconditioned, with the factor w.
    v
        Second moment without bias correction; once frozen, w.
    result
        Mean of the ranks' vectors, before `move` or `move_frozen` takes it over.
    masked
        Indices (int64) of elements that were frozen with v = 0, which move by decoupled weight decay alone.
    cohort
        Cohort of the parameters; set by the owner.
    """

    cohort: Cohort

    def __init__(self, bucket: Bucket, group_of: Mapping[Tensor, int], preconditioned: bool = False) -> None:
        self.bucket, self._preconditioned = bucket, preconditioned
        self.m, self.v, self.result = (
            torch.zeros(bucket.n, dtype=bucket.dtype, device=bucket.device) for _ in range(3)
        )
        self._m_views, self._v_views, self._result_views = map(bucket.views, (self.m, self.v, self.result))
        self.masked = torch.zeros(0, dtype=torch.int64, device=bucket.device)
        self._parameters = [member.parameter for member in bucket.members]
        self.divide(group_of)

    def divide(self, group_of: Mapping[Tensor, int]) -> None:
        """Divide the bucket among the parameter groups."""
        self._stretches: list[Stretch] = []
        parameters, ends = self._parameters, [0, *accumulate(self.bucket.lengths)]
        for group, found in groupby(range(len(parameters)), lambda place: group_of[parameters[place]]):
            places = list(found)
            part, members = slice(ends[places[0]], ends[places[-1] + 1]), slice(places[0], places[-1] + 1)
            self._stretches.append(Stretch(group, part, members, parameters[members]))

    @contextmanager
    def keeping(self, parameters: Collection[Tensor]) -> Iterator[None]:
        """Restore the moments and values of these parameters to those before the block."""
        members = [one for one in self.bucket.members if one.parameter in parameters] if parameters else []
        named = self.resting_moments() if members else {}
        kept = {key: {one.name: tensors[one.name].clone() for one in members} for key, tensors in named.items()}
        values = [self.resting_value(one).clone() for one in members]
        yield
        now = self.named() if members else {}  # `m` and `result` may have changed places
        for key, tensors in kept.items():
            for name, before in tensors.items():
                now[key][name].copy_(before)
        for one, before in zip(members, values, strict=True):
            one.parameter.detach().copy_(before)

    def resting_moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the entries of `named` that parameters keep which are frozen in this step; no copies."""
        return self.named()

    def resting_value(self, member: NamedParameter) -> Tensor:
        """Return the value that a parameter keeps which is frozen in this step; no copy."""
        return member.parameter.detach()

    def named(self) -> dict[str, dict[str, Tensor]]:
        """Return each parameter's part of m and of v, by its name; no copies."""
        return {"m": self.bucket.by_name(self._m_views), "v": self.bucket.by_name(self._v_views)}

    def own_gradients(self, reducer: BucketReducer) -> None:
        """Overwrite the reducer's vector with this rank's gradients; a missing one counts as zeros."""
        pairs = list(zip(reducer.vector_views, reducer.parameters, strict=True))
        missing = [view for view, parameter in pairs if parameter.grad is None]
        there = [view for view, parameter in pairs if parameter.grad is not None]
        if missing:
            torch._foreach_zero_(missing)
        if there:
            torch._foreach_copy_(there, [one.grad for one in reducer.parameters if one.grad is not None])

    def own_momentum(self, reducer: BucketReducer, groups: Groups) -> None:
        """Turn the gradients in the reducer's vector into this rank's momentum, which it sends once v is frozen."""
        vector = reducer.vector
        for one in self._stretches:
            group, part = groups[one.group], vector[one.part]
            self._add_penalty(group, reducer.vector_views, one)
            if self._preconditioned:
                part.mul_(self.v[one.part])
            torch.lerp(self.m[one.part], part, 1 - group["betas"][0], out=part)
        if not self._preconditioned:
            self.mask(vector)

    def masked_rest(self, vector: Tensor) -> Tensor:
        """Return the masked elements of a vector times 0: NaN where they are not finite, which the exchange refuses."""
        return vector.index_select(0, self.masked).abs_().mul_(0)

    def mask(self, vector: Tensor) -> None:
        """Multiply the masked elements by 0."""
        vector.index_copy_(0, self.masked, self.masked_rest(vector))

    def move(self, groups: Groups, step: int) -> None:
        """Take over the mean gradients in `result`, which is overwritten, and make the step of this number, from 1."""
        spare = self.result
        for one in self._stretches:
            group, part = groups[one.group], one.part
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            self._add_penalty(group, self._result_views, one)
            self._decay(group, one)
            # the operations of torch.optim.Adam, in its order
            self.m[part].lerp_(spare[part], 1 - beta1)
            self.v[part].mul_(beta2).addcmul_(spare[part], spare[part], value=1 - beta2)
            torch.sqrt(self.v[part], out=spare[part])
            spare[part].div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
            m, divisors = self._m_views[one.members], self._result_views[one.members]
            torch._foreach_addcdiv_(one.parameters, m, divisors, value=-lr / (1 - beta1**step))

    def freeze(self, groups: Groups, steps: float) -> None:
        """Turn v, after so many steps, into w; infinitely many: without bias correction."""
        self.find_masked()
        for one in self._stretches:
            group, part = groups[one.group], self.v[one.part]
            part.sqrt_().div_(math.sqrt(1 - group["betas"][1] ** steps)).add_(group["eps"]).reciprocal_()
        self.v.index_fill_(0, self.masked, 0)
        if self._preconditioned:
            self.m.mul_(self.v)

    def find_masked(self) -> None:
        """Find the elements with a v, or w, of 0."""
        self.masked = (self.v == 0).nonzero().view(-1)

    def move_frozen(self, groups: Groups, step: int) -> None:
        """Take over the first moment in `result`, and make the step of this number."""
        self.m, self.result = self.result, self.m
        self._m_views, self._result_views = self._result_views, self._m_views
        self.m.index_fill_(0, self.masked, 0)
        for one in self._stretches:
            group = groups[one.group]
            self._decay(group, one)
            m, length = self._m_views[one.members], -float(group["lr"]) / (1 - group["betas"][0] ** step)
            if self._preconditioned:
                torch._foreach_add_(one.parameters, m, alpha=length)
            else:
                torch._foreach_addcmul_(one.parameters, m, self._v_views[one.members], value=length)

    def norm(self, groups: Groups, steps: int) -> float:
        """Sum of v's elements, with bias correction; the same on all ranks, so the host adds them."""
        v, total = self.v.cpu().numpy(), 0.0
        for one in self._stretches:
            total += float(np.sum(v[one.part], dtype=np.float64)) / (1 - groups[one.group]["betas"][1] ** steps)
        return total

    @staticmethod
    def _add_penalty(group: ParameterGroup, gradients: list[Tensor], one: Stretch) -> None:
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            torch._foreach_add_(gradients[one.members], one.parameters, alpha=group["weight_decay"])

    @staticmethod
    def _decay(group: ParameterGroup, one: Stretch) -> None:
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            torch._foreach_mul_(one.parameters, 1 - float(group["lr"]) * group["weight_decay"])


class VarianceFreeze:
    """Decides when v is frozen, from values that are equal on all ranks, so that the decision is too.

    That is after `warmup_steps`, at least 1 (else ValueError), or with "auto" once v is stable.

    Attributes
    ----------
    watches
        Flag: `note` has to be called after every step.
    """

    def __init__(self, warmup_steps: int | Literal["auto"]) -> None:
        if warmup_steps != "auto" and not (isinstance(warmup_steps, int) and warmup_steps >= 1):
            raise ValueError(f'warmup_steps is {warmup_steps!r}; it is "auto" or at least 1, since v is made in them')
        self._warmup_steps, self.watches = warmup_steps, warmup_steps == "auto"
        self._norms: list[float] = []
        self._rates: list[float] = []

    def note(self, norm: float, groups: Groups) -> None:
        """Note v's norm after a step, and the learning rates of that step."""
        rates = [float(group["lr"]) for group in groups]
        if any(now > before for now, before in zip(rates, self._rates, strict=False)):
            self._norms.clear()
        self._rates = rates
        window = _window(groups)
        self._norms = [*self._norms[-window:], norm]

    def due(self, steps: int, groups: Groups) -> bool:
        """Return True if v, as it is after so many steps, has to be frozen."""
        if self._warmup_steps != "auto":
            return steps >= self._warmup_steps
        norms, window = self._norms, _window(groups)
        return len(norms) > window and norms[-1] > 0 and norms[-1] >= STABLE * norms[-1 - window]

    def renewed(self) -> VarianceFreeze:
        """Return a rule of the same option that has noted nothing."""
        return VarianceFreeze(self._warmup_steps)

    def state_dict(self) -> State:
        """Return the noted norms and learning rates."""
        return {"norms": torch.tensor(self._norms, dtype=torch.float64, device="cpu"), "rates": list(self._rates)}

    def check_state_dict(self, state: State) -> None:
        """Raise ValueError unless `load_state_dict` can take `state`."""
        rates = FREEZE_RULE.check(state)["rates"]
        norms = state.get("norms")
        numbers = torch.is_tensor(norms) and norms.ndim == 1 and norms.is_floating_point()
        if not numbers or not all(isinstance(rate, float) for rate in rates):
            raise ValueError(
                "the state is damaged (norms of v, or learning rates, are no numbers); load an earlier one"
            )

    def load_state_dict(self, state: State) -> None:
        """Restore a state of `state_dict`."""
        self._norms, self._rates = state["norms"].tolist(), list(state["rates"])


def _window(groups: Groups) -> int:
    """Steps over which the slowest group's v forgets."""
    return round(1 / (1 - max(float(group["betas"][1]) for group in groups)))
