"""SignMuon: Muon whose ranks keep their momenta and merge the signs of their orthogonal steps.

m_m <- beta m_m + (1 - beta) (g_m + wd x);   s_m = sgn(NS5(m_m))
x <- x - lr v,   v = merge of s_m, or NS5 of it

NS5 is the Newton-Schulz iteration by which Muon makes a matrix nearly orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from collectives.annotations import override
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.contrib.sign_momenta import Merge, SignAveraging, SignMomenta, merging
from mpicomp.torch.one_bit_adam.adam_moments import Stretch
from mpicomp.torch.one_bit_adam.momentum_optimizer import MomentumOptimizer
from mpicomp.torch.parameters import ParameterGroup

_newton_schulz: Any
try:
    from torch.optim._muon import _zeropower_via_newtonschulz as _newton_schulz
except ImportError:  # before PyTorch 2.9
    _newton_schulz = None


class _MuonMomenta(SignMomenta):
    """Momenta of Muon."""

    @override
    def _prepare(self, group: ParameterGroup, one: Stretch, reducer: BucketReducer) -> None:
        views = reducer.vector_views[one.members]
        if group["weight_decay"]:
            torch._foreach_add_(views, one.parameters, alpha=group["weight_decay"])
        torch.lerp(self.m[one.part], reducer.vector[one.part], 1 - group["momentum"], out=self.v[one.part])
        _orthogonalize(self._v_views[one.members], views)

    @override
    def _move(self, group: ParameterGroup, one: Stretch, signs: list[Tensor]) -> None:
        if group["orthogonalize"]:
            _orthogonalize(signs, signs)
        torch._foreach_add_(one.parameters, signs, alpha=-float(group["lr"]))


def _orthogonalize(matrices: list[Tensor], results: list[Tensor]) -> None:
    """Write NS5 of each matrix into a result, with the coefficients of ``torch.optim.Muon``."""
    for matrix, result in zip(matrices, results, strict=True):
        result.copy_(_newton_schulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7))


class SignMuon(MomentumOptimizer[SignAveraging]):
    """Muon that synchronizes the ranks by the signs of their orthogonal steps, from the first step on.

    It takes matrices only; others, embeddings and the output layer have an optimizer of their own. Each rank has a
    momentum of its own, which is never sent. Not to be wrapped in `DistributedOptimizer`. Every rank calls
    :func:`broadcast_parameters` once before. Memory: three vectors of the matrices' length.

    Parameters
    ----------
    params : iterable
        As of :class:`OneBitAdam`, whose attributes it has too; of matrices only, with PyTorch 2.9 or later.
    lr : float
        Length of each element's step, or with `orthogonalize` of each singular vector's.
    momentum : float
        beta.
    weight_decay : float
        As an L2 penalty.
    orthogonalize : bool
        True: the merged signs are made orthogonal before the step. Each rank computes this, so processors of different
        kinds may round it differently.
    merge, comm, named_parameters, bucket_mb, seed
        As of :class:`DistributedLion`.

    Raises
    ------
    ValueError, TypeError, CollectiveMismatch
        As of :class:`OneBitAdam`.

    References
    ----------
    Mishra, Trivedi, Kumar, "SignMuon: communication-efficient distributed Muon optimization" (arXiv 2605.16311).
    Merging by "marsit" is not in the paper.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import SignMuon, broadcast_parameters, require_same
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 2, bias=False)
    ...     broadcast_parameters(model, comm)
    ...     optimizer = SignMuon(model.named_parameters(), lr=0.01, comm=comm)
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
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0,
        *,
        orthogonalize: bool = False,
        merge: Merge = "vote",
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "orthogonalize": orthogonalize}
        self._open(params, defaults, partial(merging, _MuonMomenta, merge, seed), comm, named_parameters, bucket_mb)

    @override
    def _check_group(self, group: ParameterGroup) -> None:
        super()._check_group(group)
        if _newton_schulz is None:
            raise ValueError("SignMuon needs the Newton-Schulz iteration of PyTorch 2.9 or later: update torch")
        names = group.get("param_names", ["a parameter"] * len(group["params"]))
        named = [pair for pair in zip(names, group["params"], strict=True) if not is_lazy(pair[1])]
        others = [f"{self._names.get(one, name)} {list(one.shape)}" for name, one in named if one.ndim != 2]
        if others:
            raise ValueError(
                f"SignMuon takes matrices; give {', '.join(others)} to another optimizer, as DistributedLion"
            )
