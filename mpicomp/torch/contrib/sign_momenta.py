"""Common parts of the optimizers whose ranks keep their momenta and merge signs: of momenta, or of steps made of them.

s_m = sgn(direction of rank m),   sgn(0) = +1
v   = merge of s_m:   "vote"     sgn(sum of s_m), and a common coin where it is 0
                      "mean"     mean of s_m
                      "marsit"   +1 or -1, with the mean of s_m as expectation
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from collectives.annotations import override
from mpicomp.algorithms import Algorithm, EFSignSGD, MajorityVote, Marsit
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.one_bit_adam.adam_moments import AdamMoments, Groups, Stretch, VarianceFreeze
from mpicomp.torch.one_bit_adam.momentum_averaging import MomentumAveraging
from mpicomp.torch.one_bit_adam.momentum_buckets import Entries
from mpicomp.torch.one_bit_adam.momentum_optimizer import MomentumMethod
from mpicomp.torch.parameters import NamedParameter, ParameterGroup
from mpicomp.torch.state.schema import MOMENTUM, OWN_MOMENTA

Merge: TypeAlias = Literal["vote", "mean", "marsit"]
_MERGES: Mapping[str, Callable[[int], Algorithm]] = {
    "vote": lambda seed: MajorityVote(seed),
    # of signs the scale is 1 and the residual 0, so that counts are all that the ranks exchange
    "mean": lambda _: EFSignSGD(),
    "marsit": lambda seed: Marsit(None, compensation=False, global_step=1.0, seed=seed),
}


class SignMomenta(AdamMoments):
    """Momentum of this rank as `m`, the next one as `v` until the step is made, and merged signs as `result`."""

    @override
    def named(self) -> dict[str, dict[str, Tensor]]:
        return {OWN_MOMENTA: super().named()["m"]}

    @override
    def find_masked(self) -> None:
        """No-op: no element is masked."""

    @override
    def own_momentum(self, reducer: BucketReducer, groups: Groups) -> None:
        """Turn the gradients in the reducer's vector into signs; m stays as it is, in case the step fails."""
        for one in self._stretches:
            self._prepare(groups[one.group], one, reducer)
        signs = torch.where(reducer.vector < 0, -1.0, 1.0)
        reducer.vector.mul_(0).add_(signs)  # NaN stays NaN and infinity becomes NaN, which the reducer refuses

    @override
    def move_frozen(self, groups: Groups, step: int) -> None:
        self.m, self.v = self.v, self.m
        self._m_views, self._v_views = self._v_views, self._m_views
        for one in self._stretches:
            self._move(groups[one.group], one, self._result_views[one.members])

    @abstractmethod
    def _prepare(self, group: ParameterGroup, one: Stretch, reducer: BucketReducer) -> None:
        """Set v to the next momentum, and the reducer's vector to the direction whose signs are sent."""

    @abstractmethod
    def _move(self, group: ParameterGroup, one: Stretch, signs: list[Tensor]) -> None:
        """Move the parameters by merged signs, which may be overwritten."""


class SignAveraging(MomentumAveraging[SignMomenta]):
    """Makes the steps of optimizers whose ranks merge signs, from the first step on."""

    entries: ClassVar[Entries] = {OWN_MOMENTA: "elements"}
    state_schema = MOMENTUM.extended(dict.fromkeys(entries, "tensors"))

    @override
    def _freeze_due(self, groups: Groups) -> None:
        for cohort in self._cohorts:
            cohort.frozen = True
        self._follow_freezes()

    @override
    def _open_buckets(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        super()._open_buckets(members, algorithms)
        self._freeze_due(self._optimizer.param_groups)


def merging(moments: type[SignMomenta], merge: Merge, seed: int) -> MomentumMethod[SignAveraging]:
    """Return the method of an optimizer that merges signs; ValueError for other merges."""
    if merge not in _MERGES:
        raise ValueError(f"merge is {merge!r}; choose one of {', '.join(map(repr, _MERGES))}")
    return MomentumMethod(partial(SignAveraging, moments=moments), VarianceFreeze(1), _MERGES[merge](seed), {})
