"""The moments of 0/1 Adam in one bucket, its moves, and the steps at which its ranks exchange something.

    v in motion    m <- b1 m + (1 - b1) g;   x <- x - lr (m / (sqrt(v) + eps) + wd x)
    v frozen       m_rank <- b1 m_rank + (1 - b1) g_rank;   s = lr (m_rank w + wd x);   x_rank <- x_rank - s
                   w = 1 / (sqrt(v) + eps),  0 where v = 0;   L <- L + lr
    synchronizing  u = mean of the ranks' sums of s;   x <- x - u;   m <- u / (w L);   L <- 0

Here x is the common model of the last synchronization. L is an entry of the parameter groups, which ranks compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.annotations import override
from mpicomp.torch.buckets.bucket_layout import Bucket
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.one_bit_adam.adam_moments import AdamMoments, Groups
from mpicomp.torch.parameters import NamedParameter

RATE_SUM = "rate_sum"
"""Option of the parameter groups: sum of the learning rates since the last synchronization once v is frozen."""


@dataclass(frozen=True)
class Intervals:
    """Intervals between steps that update v until it is frozen, and between synchronizations from then on.

    Raises
    ------
    ValueError
        A number is less than 1, or a fraction.
    """

    warmup_steps: int
    variance_doubling: int
    local_doubling: int
    most_local_steps: int

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} is {count!r}; choose a whole number, 1 or more")

    def updates_variance(self, step: int) -> bool:
        """Return True if v takes in the mean gradient of the step with this number, from 1."""
        interval, last = 1, 0
        while True:
            first = (last // interval + 1) * interval
            last = first + (self.variance_doubling - 1) * interval
            if step <= last:
                return step >= first and step % interval == 0
            interval *= 2

    def synchronizes(self, step: int) -> bool:
        """Return True if ranks synchronize in the step with this number, from 1 at the first one with v frozen."""
        doublings = min((step - 1) // self.local_doubling, self.most_local_steps.bit_length())
        return step % min(1 << doublings, self.most_local_steps) == 0


class ZeroOneMoments(AdamMoments):
    """Moments of a bucket. Once v is frozen, m is this rank's own.

    `preconditioned`, the ranks exchange gradients and steps with the factor w; else gradients, and steps divided by it.

    Attributes
    ----------
    common
        Common model, once v is frozen.
    """

    def __init__(self, bucket: Bucket, group_of: Mapping[Tensor, int], preconditioned: bool) -> None:
        super().__init__(bucket, group_of, preconditioned=False)
        self._exchanges_steps = preconditioned
        self.common: Tensor | None = None
        self._common_views: list[Tensor] = []
        self._spoilt = torch.zeros(len(bucket.members), dtype=bucket.dtype, device=bucket.device)  # NaN where it is so

    @override
    def named(self) -> dict[str, dict[str, Tensor]]:
        common, spoilt = self.bucket.by_name(self._common_views), self.bucket.by_name(self._spoilt)
        return {**super().named(), "common": common, "spoilt": spoilt}

    @override
    def resting_moments(self) -> dict[str, dict[str, Tensor]]:
        return self.named() if self.common is None else {}  # m is set by the next synchronization

    @override
    def resting_value(self, member: NamedParameter) -> Tensor:
        return self.named()["common"].get(member.name, super().resting_value(member))

    # v in motion ------------------------------------------------------------------------------------------------------

    @override
    def own_momentum(self, reducer: BucketReducer, groups: Groups) -> None:
        """Turn the gradients in the reducer's vector into those that are exchanged compressed."""
        if self._exchanges_steps:
            for one in self._stretches:
                reducer.vector[one.part].div_(self.v[one.part].sqrt().add_(groups[one.group]["eps"]))
        vector = reducer.vector
        # NaN stays, which the exchange refuses
        vector.copy_(torch.where(self.v == 0, vector.abs().mul_(0), vector))

    def move_by_mean(self, groups: Groups, exact: bool) -> None:
        """Take over the mean gradients in `result`, which is overwritten, and make a step; update v if they are exact.

        Elements with a v of 0 have had no gradient, and compressed gradients of theirs are left out.
        """
        for one in self._stretches:
            group, part = groups[one.group], one.part
            mean, v, (beta1, beta2) = self.result[part], self.v[part], group["betas"]
            if not exact and self._exchanges_steps:
                mean.mul_(v.sqrt().add_(group["eps"]))
            self._add_penalty(group, self._result_views, one)
            if not exact:
                mean.masked_fill_(v == 0, 0)
            self._decay(group, one)
            self.m[part].lerp_(mean, 1 - beta1)
            if exact:
                v.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            torch.sqrt(v, out=mean).add_(group["eps"])
            m, divisors = self._m_views[one.members], self._result_views[one.members]
            torch._foreach_addcdiv_(one.parameters, m, divisors, value=-float(group["lr"]))

    # v frozen ---------------------------------------------------------------------------------------------------------

    @override
    def freeze(self, groups: Groups, steps: float) -> None:
        super().freeze(groups, math.inf)
        self.m.index_fill_(0, self.masked, 0)

    def have_common(self, needed: bool) -> None:
        """Have memory for the common model, or none: v is frozen or in motion, as in a state that is loaded."""
        if needed != (self.common is not None):
            self.common = torch.zeros_like(self.m) if needed else None
            self._common_views = [] if self.common is None else self.bucket.views(self.common)

    def keep_common(self) -> None:
        """Take the parameters' values for the common model."""
        torch._foreach_copy_(self._common_views, self._parameters)

    def common_values(self) -> dict[Tensor, Tensor]:
        """Return the common model by parameters; no copies."""
        return dict(zip(self._parameters, self._common_views, strict=True))

    def move_alone(self, reducer: BucketReducer, groups: Groups) -> None:
        """Make a step by this rank's gradients.

        Gradients that are not finite count as zeros here, and spoil the next synchronization on all ranks.
        """
        self.own_gradients(reducer)
        for flag, gradient in zip(self._spoilt, reducer.vector_views, strict=True):
            flag.add_((gradient * 0).sum())
        torch.nan_to_num_(reducer.vector, nan=0.0, posinf=0.0, neginf=0.0)
        self._own_step(reducer, groups, self.m)
        torch._foreach_sub_(self._parameters, reducer.vector_views)

    def own_moves(self, reducer: BucketReducer, groups: Groups, with_step: bool, has_moved: bool) -> None:
        """Write this rank's moves since the last synchronization into the reducer's vector, to be exchanged.

        `with_step`, they include the step by the gradients in the vector; without `has_moved`, no others.
        """
        vector = reducer.vector
        if with_step:
            self._own_step(reducer, groups, vector)
        else:
            vector.zero_()
        if has_moved:
            torch._foreach_add_(reducer.vector_views, self._common_views)
            torch._foreach_sub_(reducer.vector_views, self._parameters)
        rest = self.masked_rest(vector)
        if not self._exchanges_steps:
            vector.div_(self.v)
        for part, ratio in self._ratios(groups):
            vector[part].mul_(ratio)
        vector.index_copy_(0, self.masked, rest)
        for flag, moves in zip(self._spoilt, reducer.vector_views, strict=True):
            moves.add_(flag)
        self._spoilt.zero_()

    def move_together(self, groups: Groups) -> None:
        """Move the common model by the mean of the ranks' moves in `result`, which is overwritten."""
        if not self._exchanges_steps:
            self.result.mul_(self.v)
        for part, ratio in self._ratios(groups):
            self.result[part].mul_(1 / ratio if ratio else 0.0)
        self.result.index_fill_(0, self.masked, 0)
        for one in self._stretches:
            part, rates = one.part, groups[one.group][RATE_SUM]
            if rates:
                torch.div(self.result[part], self.v[part], out=self.m[part]).div_(rates)
            else:  # nothing has moved, and the momentum is not known
                self.m[part].zero_()
        self.m.index_fill_(0, self.masked, 0)
        torch._foreach_copy_(self._parameters, self._common_views)
        torch._foreach_sub_(self._parameters, self._result_views)

    def _ratios(self, groups: Groups) -> Iterator[tuple[slice, float]]:
        """Yield the parts of groups with lower rates than the highest one, and the ratio of that rate to theirs.

        Neighbouring elements share a code's scale: without the ratios all of them would move by the highest rate. The
        ratio is 0 where a group's rates are 0, or so low that it would overflow.
        """
        rates = [groups[one.group][RATE_SUM] for one in self._stretches]
        most = max(rates)
        for one, rate in zip(self._stretches, rates, strict=True):
            if rate != most:
                yield one.part, most / rate if rate > most / 1e30 else 0.0

    def _own_step(self, reducer: BucketReducer, groups: Groups, momentum: Tensor) -> None:
        """Turn the gradients in the reducer's vector into this rank's step, and write its m to `momentum`."""
        for one in self._stretches:
            group, part = groups[one.group], one.part
            step = reducer.vector[part]
            self._add_penalty(group, reducer.vector_views, one)
            torch.lerp(self.m[part], step, 1 - group["betas"][0], out=momentum[part])
            torch.mul(momentum[part], self.v[part], out=step).mul_(float(group["lr"]))
            if group["weight_decay"] and group["decoupled_weight_decay"]:
                views = reducer.vector_views[one.members]
                torch._foreach_add_(views, one.parameters, alpha=float(group["lr"]) * group["weight_decay"])
        self.mask(reducer.vector)
