"""OneBitLamb: LAMB whose ranks exchange their momenta in one bit per element once v is frozen.

steps 1 .. T   LAMB on the dense mean of the gradients, without bias correction:
u = m / (sqrt(v) + eps) + wd x;   r = clip(|x| / |u|, min_coeff, max_coeff);   x <- x - lr r u
c <- coeff_beta c + (1 - coeff_beta) r                                         for each tensor
at T           v is frozen, and a copy z of it goes on;   s = mean over tensors of rms(m) / rms(m of the tensor)
later          m <- DoubleSqueeze(s (b1 m + (1 - b1) g_rank)) / s
g = (m - b1 m_before) / (1 - b1);   z <- b2 z + (1 - b2) g^2
p = m / (sqrt(v) + eps);   u = p + wd x
f = max over elements of (sqrt(v) + eps) / (sqrt(z) + eps)
f <- f a + 1 - a,   a = min(1, |p| / |u|)                                      with weight decay
f, clipped to [factor_min, factor_max] and to a factor 1 +- factor_threshold of its last value
x <- x - lr c f u
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from collectives.annotations import override
from mpicomp.torch.buckets.bucket_layout import Bucket
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.one_bit_adam.adam_moments import AdamMoments, Cohort, Groups, VarianceFreeze
from mpicomp.torch.one_bit_adam.momentum_averaging import MomentumAveraging
from mpicomp.torch.one_bit_adam.momentum_buckets import Entries
from mpicomp.torch.one_bit_adam.momentum_optimizer import MomentumMethod, MomentumOptimizer, adam_defaults, squeezing
from mpicomp.torch.parameters import ParameterGroup
from mpicomp.torch.state.schema import MOMENTUM

_PER_TENSOR = ("coefficient", "factor", "scale")


class LambMoments(AdamMoments):
    """Moments of a bucket, and for each tensor c, f and s. Once frozen, v is 1 / (sqrt(v) + eps), 0 where v was 0."""

    def __init__(self, bucket: Bucket, group_of: Mapping[Tensor, int]) -> None:
        super().__init__(bucket, group_of)
        self._fresh = torch.zeros_like(self.v)  # z
        self._fresh_views = bucket.views(self._fresh)
        self._by_tensor = torch.ones(3, len(bucket.members), dtype=bucket.dtype, device=bucket.device)
        self._coefficients, self._factors, self.scales = self._by_tensor
        self._coefficients.zero_()

    @override
    def named(self) -> dict[str, dict[str, Tensor]]:
        numbers = dict(zip(_PER_TENSOR, map(self.bucket.by_name, self._by_tensor), strict=True))
        return {**super().named(), "fresh": self.bucket.by_name(self._fresh_views), **numbers}

    @override
    def own_momentum(self, reducer: BucketReducer, groups: Groups) -> None:
        super().own_momentum(reducer, groups)
        torch._foreach_mul_(reducer.vector_views, list(self.scales))

    @override
    def move(self, groups: Groups, step: int) -> None:
        for one in self._stretches:
            group, part = groups[one.group], one.part
            (beta1, beta2), mean = group["betas"], self.result[part]
            self._add_penalty(group, self._result_views, one)
            self.m[part].lerp_(mean, 1 - beta1)
            self.v[part].mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            torch.div(self.m[part], self.v[part].sqrt().add_(group["eps"]), out=mean)
            self._step(group, one.members, self._move_tensor)

    def _move_tensor(self, place: int, parameter: Tensor, update: Tensor, group: ParameterGroup) -> Tensor:
        """Return r of a tensor, and take it into c."""
        self._add_decay(group, parameter, update)
        sizes = parameter.norm(), update.norm()
        ratio = (sizes[0] / sizes[1]).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((sizes[0] > 0) & (sizes[1] > 0), ratio, 1.0)
        self._coefficients[place].lerp_(ratio, 1 - group["coeff_beta"])
        return ratio

    def _step(self, group: ParameterGroup, members: slice, length: Any) -> None:
        """Move tensors by the updates in `result`, of which `length` completes one and returns its factor."""
        for place in range(members.start, members.stop):
            parameter, update = self.bucket.members[place].parameter, self._result_views[place]
            parameter.sub_(update.mul_(length(place, parameter, update, group) * float(group["lr"])))

    @staticmethod
    def _add_decay(group: ParameterGroup, parameter: Tensor, update: Tensor) -> None:
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])

    @override
    def freeze(self, groups: Groups, steps: float) -> None:
        self._fresh.copy_(self.v)
        super().freeze(groups, math.inf)

    def mean_squares(self) -> Tensor:
        """Return the root of the mean square of m, of each tensor."""
        return torch.stack([m.double().square().mean().sqrt() for m in self._m_views])

    @override
    def move_frozen(self, groups: Groups, step: int) -> None:
        torch._foreach_div_(self._result_views, list(self.scales))
        self.result.index_fill_(0, self.masked, 0)
        for one in self._stretches:
            (beta1, beta2), part = groups[one.group]["betas"], one.part
            gradient = torch.sub(self.result[part], self.m[part], alpha=beta1).div_(1 - beta1)
            self._fresh[part].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            self.m[part].copy_(self.result[part])
            self.result[part].mul_(self.v[part])
            self._step(groups[one.group], one.members, self._move_frozen_tensor)

    def _move_frozen_tensor(self, place: int, parameter: Tensor, update: Tensor, group: ParameterGroup) -> Tensor:
        """Return c f of a tensor, with the new f."""
        inverse, before = self._v_views[place], self._factors[place]
        ratios = 1 / (inverse * (self._fresh_views[place].sqrt() + group["eps"]))
        factor = torch.where(inverse > 0, ratios, 0).max()  # elements without a momentum do not decide
        size = update.norm()
        self._add_decay(group, parameter, update)
        if group["weight_decay"]:
            share = (size / update.norm()).clamp(max=1).nan_to_num(1.0)
            factor = factor * share + 1 - share
        factor = factor.clamp(group["factor_min"], group["factor_max"])
        change = group["factor_threshold"]
        before.copy_(torch.minimum(torch.maximum(factor, before * (1 - change)), before * (1 + change)))
        return torch.mul(self._coefficients[place], before)


class LambAveraging(MomentumAveraging[LambMoments]):
    """Makes the steps of `OneBitLamb`."""

    entries: ClassVar[Entries] = {
        "m": "elements", "v": "elements", "fresh": "elements",
        "coefficient": "number", "factor": "number", "scale": "number",
    }  # fmt: skip
    state_schema = MOMENTUM.extended(dict.fromkeys(entries, "tensors"))

    @override
    def _freeze(self, cohort: Cohort, groups: Groups, steps: int) -> None:
        super()._freeze(cohort, groups, steps)
        here = self._moments_in(cohort)
        sizes = [moments.mean_squares() for moments in here]
        mean = torch.cat([one.cpu() for one in sizes]).mean()
        for moments, own in zip(here, sizes, strict=True):
            moments.scales.copy_(torch.where(own > 0, mean.to(own.device) / own, 1.0))


class OneBitLamb(MomentumOptimizer[LambAveraging]):
    """1-bit LAMB: LAMB that synchronizes the ranks by compressed momenta, scaled for each tensor.

    Once v is frozen, the layers' learning rates follow from their last values before, and from an estimate of how v
    would have gone on. Attributes and all other rules are those of :class:`OneBitAdam`.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay
        As of ``torch.optim.AdamW``. The moments have no bias corrections.
    decoupled_weight_decay : bool
        True: weight decay is part of the update that is scaled; False: as an L2 penalty.
    max_coeff, min_coeff : float
        Bounds of the ratio of a tensor's norm to that of its update.
    coeff_beta : float
        Decay rate of the running mean of this ratio, which is used once v is frozen.
    factor_max, factor_min : float
        Bounds of the factor by which it is multiplied then.
    factor_threshold : float
        Largest relative change of this factor in a step.
    warmup_steps : int or "auto"
        Steps of dense LAMB, as of :class:`OneBitAdam`.
    bits, compressor, per_node, comm, named_parameters, bucket_mb, seed
        As of :class:`OneBitAdam`.

    Raises
    ------
    ValueError, TypeError, CollectiveMismatch
        As of :class:`OneBitAdam`.

    References
    ----------
    Li, Awan, Tang, Rajbhandari, He, "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's
    convergence speed", HiPC 2022 (arXiv 2104.06069).

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import OneBitLamb, broadcast_parameters, require_same
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 1)
    ...     broadcast_parameters(model, comm)
    ...     optimizer = OneBitLamb(model.named_parameters(), lr=0.01, warmup_steps=2, comm=comm)
    ...     for step in range(4):
    ...         optimizer.zero_grad()
    ...         model(torch.full((8, 3), comm.rank + 1.0)).square().mean().backward()
    ...         optimizer.step()
    ...     require_same(model, comm)
    ...     return optimizer.steps, optimizer.frozen, optimizer.masked
    >>> mpicomp.run_local(2, train)[0]
    (4, True, 0)
    """

    @in_own_mode
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        decoupled_weight_decay: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        bits: int = 1,
        warmup_steps: int | Literal["auto"] = "auto",
        compressor: Any = None,
        per_node: Literal["auto", "shared", "ring"] | None = None,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ) -> None:
        bounds = {
            "max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta, "factor_max": factor_max,
            "factor_min": factor_min, "factor_threshold": factor_threshold,
        }  # fmt: skip

        def make_method() -> MomentumMethod[LambAveraging]:
            wrong = {key: one for key, one in bounds.items() if not isinstance(one, int | float) or not one >= 0}
            if wrong or min_coeff > max_coeff or factor_min > factor_max or coeff_beta >= 1:
                raise ValueError(
                    f"{wrong or bounds}: choose numbers of 0 or more, lower bounds up to the upper ones, and a "
                    "coeff_beta below 1"
                )
            rule, algorithm = VarianceFreeze(warmup_steps), squeezing(bits, compressor, seed, per_node)
            averaging = partial(LambAveraging, moments=LambMoments)
            return MomentumMethod(averaging, rule, algorithm, {"warmup_steps": warmup_steps})

        defaults = adam_defaults(lr, betas, eps, weight_decay, decoupled_weight_decay)
        self._open(params, defaults | bounds, make_method, comm, named_parameters, bucket_mb)
