"""The steps of 0/1 Adam: of all ranks while v is in motion, of each rank alone or of all once it is frozen.

Cohorts whose v is frozen synchronize in the same steps, by the schedule of the first one. So a cohort that joined later
freezes its v after a synchronization only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from collectives.annotations import override
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.one_bit_adam.adam_moments import Cohort, Groups
from mpicomp.torch.one_bit_adam.momentum_averaging import MomentumAveraging
from mpicomp.torch.one_bit_adam.momentum_buckets import Entries
from mpicomp.torch.one_bit_adam.zero_one_moments import RATE_SUM, Intervals, ZeroOneMoments
from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.replication import require_same_values
from mpicomp.torch.state.schema import GRADIENT_ROUNDS, MOMENTUM, State
from mpicomp.torch.synchronizer.step_agreement import StepIntent
from mpicomp.torch.synchronizer.synchronizer import Phase

_ROUNDS = GRADIENT_ROUNDS.extended({"steps": "counter", "frozen_at": "counter"})


class ZeroOneAveraging(MomentumAveraging[ZeroOneMoments]):
    """Makes the steps of `ZeroOneAdam`, at the `intervals`.

    Attributes
    ----------
    pending
        Steps that this rank has made alone since the last synchronization.
    """

    entries: ClassVar[Entries] = {"m": "elements", "v": "elements", "common": "elements of frozen", "spoilt": "number"}
    saves_squeezed = True
    state_schema = MOMENTUM.extended({**dict.fromkeys(entries, "tensors"), "rounds": dict})

    def __init__(self, *parts: Any, intervals: Intervals, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.pending = 0
        self._intervals = intervals
        self._frozen_at = 0  # the step behind which v of the first cohort was frozen
        self._due: list[BucketReducer] = []  # the reducers of this step
        self._with_step = True  # moves that are sent include the step by the gradients
        self.agreement.members = self.reducers.members

    @property
    @override
    def models_differ(self) -> bool:
        return self.pending > 0

    @property
    def _synchronizes(self) -> bool:
        """Flag: cohorts whose v is frozen synchronize in the step to come."""
        return self._intervals.synchronizes(self.steps + 1 - self._frozen_at)

    @property
    @override
    def can_refuse(self) -> bool:
        return not self.frozen or self._synchronizes

    @override
    def _compare_models(self) -> None:
        # of 16-bit parameters the masters, which may differ by less than the parameters show
        common = self.agreement.common
        members = self.reducers.members
        require_same_values({one.name: common.get(one.parameter, one.parameter) for one in members}, self.comm)

    @override
    def _make_step(self, groups: Groups) -> None:
        together = self._synchronizes
        for moments in () if self.pending else self._frozen_moments():
            moments.keep_common()
        self._due = [self._reducer(moments) for moments in self.moments if together or not moments.cohort.frozen]
        rates = [group[RATE_SUM] for group in groups]
        for group in groups if self._cohorts[0].frozen else ():
            group[RATE_SUM] += float(group["lr"])  # before ranks compare it: `settle` makes no step
        try:
            if self._due:
                self.synchronize()
        except BaseException:
            for group, before in zip(groups, rates, strict=True):
                group[RATE_SUM] = before
            raise
        resting = {member.parameter for member in self._changes.frozen}
        for moments in self.moments:
            with moments.keeping(resting):
                self._move(moments, together, groups)
        self.steps += 1
        self.pending = 0 if together or not self._cohorts[0].frozen else self.pending + 1
        self._end_round(groups)

    def _frozen_moments(self) -> list[ZeroOneMoments]:
        return [moments for moments in self.moments if moments.cohort.frozen]

    def _reducer(self, moments: ZeroOneMoments) -> BucketReducer:
        """Return the reducer of a bucket for the step to come."""
        cohort = moments.cohort
        exact = not cohort.frozen and self._intervals.updates_variance(self.steps + 1 - cohort.joined)
        return (self.reducers if exact else self._squeezed)[moments.bucket.index]

    def _move(self, moments: ZeroOneMoments, together: bool, groups: Groups) -> None:
        if not moments.cohort.frozen:
            moments.move_by_mean(groups, self._reducer(moments) is self.reducers[moments.bucket.index])
        elif together:
            moments.move_together(groups)
        else:
            moments.move_alone(self._squeezed[moments.bucket.index], groups)

    def _end_round(self, groups: Groups) -> None:
        """Freeze v where that is due, if the ranks' models are equal, and have the next step compare the common one."""
        self.agreement.common = {}
        if self.pending:
            common = (moments.common_values() for moments in self._frozen_moments())
            self.agreement.common = {parameter: value for one in common for parameter, value in one.items()}
            return
        for group in groups:
            group[RATE_SUM] = 0.0
        if not self._cohorts[0].frozen:
            self._frozen_at = self.steps
        self._freeze_due(groups)

    @override
    def _freeze(self, cohort: Cohort, groups: Groups, steps: int) -> None:
        super()._freeze(cohort, groups, steps)
        for moments in self._moments_in(cohort):  # errors of gradients are no errors of steps
            self._clear_errors(moments)

    @override
    def _follow_freezes(self) -> None:
        for moments in self.moments:  # each step chooses its reducers
            moments.have_common(moments.cohort.frozen)

    @override
    def synchronize(self) -> None:
        self._average(StepIntent(), self._due)
        self.phase = Phase.AVERAGED
        self.active[:] = self._due
        self.synchronizations += 1

    @torch.no_grad()
    def settle(self) -> None:
        """Synchronize now, unless the ranks' models are equal."""
        if not self.pending:
            return
        self._masters.refresh()
        self._with_step = False
        frozen = self._frozen_moments()
        self._due = [self._squeezed[moments.bucket.index] for moments in frozen]
        try:
            self.synchronize()
        finally:
            self._with_step = True
        groups = self._optimizer.param_groups
        for moments in frozen:
            moments.move_together(groups)
        self.pending = 0
        self._end_round(groups)
        self._masters.publish()
        self.phase = Phase.STEPPED

    @override
    def _open_buckets(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        before = len(self.moments)
        super()._open_buckets(members, algorithms)
        if self._with_step:
            self._due += map(self._reducer, self.moments[before:])

    @override
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        moments = self.moments[reducer.bucket.index]
        if self._with_step:
            moments.own_gradients(reducer)
        if reducer is self.reducers[reducer.bucket.index]:
            return True
        if moments.common is None:
            moments.own_momentum(reducer, self._optimizer.param_groups)
        else:
            moments.own_moves(reducer, self._optimizer.param_groups, self._with_step, self.pending > 0)
        return True

    # States -----------------------------------------------------------------------------------------------------------

    @override
    def own_entries(self) -> State:
        rounds = {"rounds": self.synchronizations, "steps": self.pending, "frozen_at": self._frozen_at}
        return {**super().own_entries(), "rounds": rounds}

    @override
    def check_own(self, own: State) -> None:
        _ROUNDS.check(own["rounds"])
        super().check_own(own)

    @override
    def restored_point(self, own: State) -> str:
        return f"{super().restored_point(own)}, {own['rounds']['steps']} steps after the last synchronization"

    @override
    @torch.no_grad()
    def load_own(self, own: State) -> None:
        super().load_own(own)
        rounds = own["rounds"]
        self.synchronizations, self.pending, self._frozen_at = rounds["rounds"], rounds["steps"], rounds["frozen_at"]
        self._end_round(self._optimizer.param_groups)
