"""The "momenta" mode, 1-bit Adam: the ranks average gradients until v is frozen, and their first moments from then on.

The optimizer is the object that users step; this synchronizer moves its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from collectives.annotations import override
from collectives.quoting import shown
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.optimizer.adam_moments import AdamMoments, VarianceFreeze, check_group
from mpicomp.torch.optimizer.step_agreement import StepIntent
from mpicomp.torch.optimizer.synchronizer import Closure, Phase, Synchronizer, SynchronizerParts
from mpicomp.torch.parameters import MasterWeights
from mpicomp.torch.state.rank_state import require_aggregators
from mpicomp.torch.state.schema import MOMENTA, NamedTensors, State


class MomentumAveraging(Synchronizer):
    """Makes the steps of `OneBitAdam`, each of which synchronizes.

    Momenta are averaged by the reducers `squeezed`, in the same buckets as the gradients; `preconditioned`, with the
    factor w. A state is recognized by the `options` as text. Once v is frozen, `frozen` is set.
    """

    mode = "momenta"
    state_schema = MOMENTA

    def __init__(
        self,
        parts: SynchronizerParts,
        squeezed: BucketReducers,
        masters: MasterWeights,
        freeze_rule: VarianceFreeze,
        preconditioned: bool,
        options: str,
    ) -> None:
        super().__init__(parts)
        self.frozen = False
        self._dense, self._squeezed = parts.reducers, squeezed
        self._masters, self._freeze_rule, self._options = masters, freeze_rule, options
        group_of = {one: number for number, group in enumerate(parts.optimizer.param_groups) for one in group["params"]}
        self.moments = [AdamMoments(reducer.bucket, group_of, preconditioned) for reducer in squeezed]

    @override
    @torch.no_grad()
    def step(self, closure: Closure | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_before_step()
        self._take_gradients()
        self.synchronize()
        groups, steps = self._optimizer.param_groups, self.synchronizations
        for moments in self.moments:
            if self.frozen:
                moments.move_frozen(groups, steps)
            else:
                moments.move(groups, steps)
        self.phase = Phase.STEPPED
        self._masters.publish()
        if not self.frozen and self._freeze_rule.watches:
            self._freeze_rule.note(sum(moments.norm(groups, steps) for moments in self.moments), groups)
        return loss

    @override
    def check_before_step(self) -> None:
        self.phase = Phase.COLLECTING
        super().check_before_step()
        try:
            for group in self._optimizer.param_groups:
                check_group(group)
            for member in self._parameters.trained:
                gradient = member.parameter.grad
                if gradient is not None and gradient.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of {member.name!r} is sparse, which OneBitAdam does not take; build its layer "
                        "with sparse=False"
                    )
        except ValueError as error:
            self.refuse(ValueError(f"{self.comm.here}: {error}"))

    @override
    def _take_gradients(self) -> None:
        """Hand the gradients to the masters, and freeze v if it is due."""
        self._masters.refresh()
        self._masters.take_gradients()
        groups = self._optimizer.param_groups
        if not self.frozen and self._freeze_rule.due(self.synchronizations, groups):
            for moments in self.moments:
                moments.freeze(groups, self.synchronizations)
            self._set_frozen(True)

    @override
    def synchronize(self) -> None:
        """Average gradients or momenta into each bucket's `AdamMoments.result`, of all buckets or of none."""
        self._average(StepIntent())
        self.phase = Phase.AVERAGED
        self.synchronizations += 1

    def _set_frozen(self, frozen: bool) -> None:
        self.frozen, self.reducers = frozen, self._squeezed if frozen else self._dense

    @override
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        moments = self.moments[reducer.bucket.index]
        moments.own_gradients(reducer)
        if self.frozen:
            moments.own_momentum(reducer, self._optimizer.param_groups)
        return True

    @override
    def _take(self, reducer: BucketReducer) -> None:
        self.moments[reducer.bucket.index].result.copy_(reducer.mean)

    @override
    def prepare_for_scaler(self) -> None:
        # A GradScaler would skip a step on the one rank that finds infinities in its gradients.
        raise RuntimeError(f"{self.comm.here}: OneBitAdam takes no GradScaler; use bfloat16, which needs none")

    @override
    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients of 16-bit parameters, which the optimizer cannot see."""
        self._masters.drop_gradients(set_to_none)

    @override
    def refuse(self, error: Exception) -> NoReturn:
        self.comm.reject(error, "a step of OneBitAdam")

    # States -----------------------------------------------------------------------------------------------------------

    @override
    def own_entries(self) -> State:
        tensors = {key: {name: one.clone() for name, one in found.items()} for key, found in self._named().items()}
        return {
            "options": self._options,
            "steps": self.synchronizations,
            "frozen": self.frozen,
            **tensors,
            "freeze_rule": self._freeze_rule.state_dict(),
        }

    @override
    def check_own(self, own: State) -> None:
        self._freeze_rule.check_state_dict(own["freeze_rule"])
        if own["options"] != self._options:
            raise ValueError(
                f"the state is of {shown(own['options'])}, and this is {self._options}; use the same options"
            )
        self.state_schema.check_tensors(own, self._named())
        reducers = self._squeezed if own["frozen"] else self._dense
        require_aggregators(own, [reducer.aggregator for reducer in reducers])

    @override
    def restored_point(self, own: State) -> str:
        return f"after {own['steps']} steps, with v {'frozen' if own['frozen'] else 'in motion'}"

    @override
    @torch.no_grad()
    def load_own(self, own: State) -> None:
        self.synchronizations = own["steps"]
        self._set_frozen(own["frozen"])
        self._freeze_rule.load_state_dict(own["freeze_rule"])
        for key, tensors in self._named().items():
            for name, one in tensors.items():
                one.copy_(own[key][name])
        if self.frozen:
            for moments in self.moments:
                moments.find_masked()
        self.models_compared = False

    @override
    def wrapped_state(self) -> State:
        return torch.optim.Optimizer.state_dict(self._optimizer)

    @override
    def _load_optimizer(self, state: State) -> None:
        groups: State = {"state": {}, "param_groups": state.get("param_groups")}
        torch.optim.Optimizer.load_state_dict(self._optimizer, groups)
        for group in self._optimizer.param_groups:
            check_group(group)

    def _named(self) -> Mapping[str, NamedTensors]:
        """Return the tensors of a state, by the parameters' names; no copies."""
        found: dict[str, dict[str, Tensor]] = {"m": {}, "v": {}}
        for moments in self.moments:
            for key, tensors in moments.named().items():
                found[key] |= tensors
        masters = set(self._masters.masters)
        members = (member for reducer in self._squeezed for member in reducer.bucket.members)
        return {**found, "masters": {o.name: o.parameter.detach() for o in members if o.parameter in masters}}
