"""DistributedLion: Lion whose ranks keep their momenta and merge the signs of their steps.

s_m = sgn(b1 m_m + (1 - b1) g_m);   m_m <- b2 m_m + (1 - b2) g_m
x <- x - lr (merge of s_m + wd x)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from collectives.annotations import override
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.contrib.sign_momenta import Merge, SignAveraging, SignMomenta, merging
from mpicomp.torch.one_bit_adam.adam_moments import Stretch
from mpicomp.torch.one_bit_adam.momentum_optimizer import MomentumOptimizer
from mpicomp.torch.parameters import ParameterGroup


class _LionMomenta(SignMomenta):
    """Momenta of Lion."""

    @override
    def _prepare(self, group: ParameterGroup, one: Stretch, reducer: BucketReducer) -> None:
        (beta1, beta2), m, gradient = group["betas"], self.m[one.part], reducer.vector[one.part]
        torch.lerp(m, gradient, 1 - beta2, out=self.v[one.part])
        torch.lerp(m, gradient, 1 - beta1, out=gradient)

    @override
    def _move(self, group: ParameterGroup, one: Stretch, signs: list[Tensor]) -> None:
        lr = float(group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_(one.parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(one.parameters, signs, alpha=-lr)


class DistributedLion(MomentumOptimizer[SignAveraging]):
    """Lion that synchronizes the ranks by the signs of their steps, from the first step on.

    Each rank has a momentum of its own, which is never sent. Not to be wrapped in `DistributedOptimizer`. Every rank
    calls :func:`broadcast_parameters` once before. Memory: three vectors of the model's length.

    Parameters
    ----------
    params, comm, named_parameters, bucket_mb
        As of :class:`OneBitAdam`, whose attributes it has too.
    lr : float
        Length of each element's step.
    betas : (float, float)
        Weights of the momentum in the step, and in the next momentum.
    weight_decay : float
        Decoupled weight decay.
    merge : "vote", "mean" or "marsit"
        "vote": the sign that most ranks have (`MajorityVote`); "mean": the mean of the signs (counts in both phases, by
        `EFSignSGD`); "marsit": one bit per element on every hop, whose expectation is the mean (`Marsit`).
    seed : int
        Seed of the coins of "vote" and "marsit"; equal on all ranks.

    Raises
    ------
    ValueError, TypeError, CollectiveMismatch
        As of :class:`OneBitAdam`.

    Notes
    -----
    The sign of 0 is +1, and a missing gradient counts as zeros. So an element that never has a gradient moves by lr at
    each step: freeze such parameters.

    References
    ----------
    Liu, Wu, Chen, Liu, Zhu, Zhang, Liu, "Communication efficient distributed training with distributed Lion", NeurIPS
    2024 (arXiv 2404.00438). Merging by "marsit" is not in the paper.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import DistributedLion, broadcast_parameters, require_same
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 1)
    ...     broadcast_parameters(model, comm)
    ...     optimizer = DistributedLion(model.named_parameters(), lr=0.01, comm=comm)
    ...     for step in range(4):
    ...         optimizer.zero_grad()
    ...         model(torch.full((8, 3), comm.rank + 1.0)).square().mean().backward()
    ...         optimizer.step()
    ...     require_same(model, comm)
    ...     return optimizer.steps
    >>> mpicomp.run_local(2, train)
    [4, 4]
    """

    @in_own_mode
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        merge: Merge = "vote",
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        self._open(params, defaults, partial(merging, _LionMomenta, merge, seed), comm, named_parameters, bucket_mb)
