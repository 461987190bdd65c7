"""The "momenta" mode, of 1-bit Adam and its relatives: gradients are averaged until v is frozen, then first moments.

The optimizer is the object that users step; this synchronizer moves its parameters.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from collectives.annotations import override
from collectives.errors import reword
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.one_bit_adam.adam_moments import Cohort, Groups, check_group
from mpicomp.torch.one_bit_adam.momentum_buckets import Moments, MomentumBuckets, number_groups
from mpicomp.torch.synchronizer.step_agreement import StepIntent
from mpicomp.torch.synchronizer.synchronizer import Closure, Phase


class MomentumAveraging(MomentumBuckets[Moments]):
    """Makes the steps of `OneBitAdam`, each of which synchronizes."""

    @override
    @torch.no_grad()
    def step(self, closure: Closure | None) -> float | None:
        loss = None
        if closure is not None:
            with self._reporting(), torch.enable_grad():
                loss = closure()
        self.check_before_step()
        self._take_gradients()
        self._follow_places(self._optimizer.param_groups)
        self._make_step(self._optimizer.param_groups)
        self.phase = Phase.STEPPED
        self._masters.publish()
        return loss

    def _follow_places(self, groups: Groups) -> None:
        """Divide the buckets again where parameters have changed their groups, in this step or in a former one."""
        if self._places != self._parameters.places:
            for moments in self.moments:
                moments.divide(number_groups(groups))
            self._places = self._parameters.places

    def _make_step(self, groups: Groups) -> None:
        """Average, and move the parameters."""
        self._freeze_due(groups)
        self.synchronize()
        self.steps += 1
        resting = {member.parameter for member in self._changes.frozen}
        for moments in self.moments:
            cohort = moments.cohort
            with moments.keeping(resting):
                (moments.move_frozen if cohort.frozen else moments.move)(groups, self.steps - cohort.joined)
        for cohort in self._cohorts:
            if not cohort.frozen and cohort.rule.watches:
                steps = self.steps - cohort.joined
                cohort.rule.note(sum(one.norm(groups, steps) for one in self._moments_in(cohort)), groups)

    @override
    def check_before_step(self) -> None:
        self.phase = Phase.COLLECTING
        super().check_before_step()
        try:
            for group in self._optimizer.param_groups:
                check_group(group, self._optimizer)
            self._require_dense_gradients()
        except (TypeError, ValueError) as error:
            refusal = reword(error, f"{self.comm.here}: {error}")
            if self.can_refuse:
                self.refuse(refusal)
            raise refusal from None

    def _require_dense_gradients(self) -> None:
        for member in (*self._parameters.trained, *self._changes.joining):
            gradient = member.parameter.grad
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {member.name!r} is sparse, which {self._name} does not take; build its layer "
                    "with sparse=False"
                )

    @override
    def _take_gradients(self) -> None:
        """Hand the gradients to the masters."""
        self._masters.refresh()
        try:
            self._masters.take_gradients_of_step()
        except RuntimeError as error:
            self.refuse(RuntimeError(f"{self.comm.here}: {error}"))
        self._changes.drop_frozen_gradients()

    def _freeze_due(self, groups: Groups) -> None:
        """Freeze v of the cohorts whose rule is fulfilled."""
        for cohort in self._cohorts:
            steps = self.steps - cohort.joined
            if not cohort.frozen and cohort.rule.due(steps, groups):
                self._freeze(cohort, groups, steps)
                cohort.frozen = True
                self._follow_freezes()

    def _freeze(self, cohort: Cohort, groups: Groups, steps: int) -> None:
        for moments in self._moments_in(cohort):
            moments.freeze(groups, steps)

    @override
    def synchronize(self) -> None:
        """Average gradients or momenta into each bucket's `AdamMoments.result`, of all buckets or of none."""
        self._average(StepIntent())
        self.phase = Phase.AVERAGED
        self.synchronizations += 1

    @override
    def _watch_gradients(self, first: int) -> None:
        """No-op: nothing is sent during backward."""

    @override
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        moments = self.moments[reducer.bucket.index]
        moments.own_gradients(reducer)
        if reducer is not self.reducers[reducer.bucket.index]:
            moments.own_momentum(reducer, self._optimizer.param_groups)
        return True

    @override
    def _take(self, reducer: BucketReducer) -> None:
        self.moments[reducer.bucket.index].result.copy_(reducer.mean)

    @override
    def prepare_for_scaler(self) -> None:
        # A GradScaler would skip a step on the one rank that finds infinities in its gradients.
        raise RuntimeError(f"{self.comm.here}: {self._name} takes no GradScaler; use bfloat16, which needs none")

    @override
    def show_gradients(self) -> None:
        self._masters.show_gradients()

    @override
    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients of 16-bit parameters, which the optimizer cannot see."""
        self._masters.drop_gradients(set_to_none)

    @override
    def refuse(self, error: Exception) -> NoReturn:
        self.comm.reject(error, f"a step of {self._name}")
