"""Moves of the ranks' local models, which are averaged by fragment, and the common model.

The synchronization of a fragment makes x <- x - aggregate(x - x_local) and x_local <- x; or an outer optimizer moves x
by the aggregated update (`outer_step.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collectives.annotations import override
from collectives.errors import CollectiveMismatch
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.local_steps.common_model import CommonModel
from mpicomp.torch.local_steps.fragments import FragmentInFlight, Fragments
from mpicomp.torch.local_steps.outer_step import OuterStep, only
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.state.schema import UPDATE_ROUNDS, State
from mpicomp.torch.synchronizer.bucket_averaging import SynchronizerParts
from mpicomp.torch.synchronizer.step_agreement import StepIntent
from mpicomp.torch.synchronizer.synchronizer import Synchronizer


class LocalMoves(Synchronizer):
    """Averages the moves of each of the `fragments` in its own steps.

    The optimizer of `outer` moves the common model by the aggregated updates; None: they are subtracted.

    Attributes
    ----------
    steps
        Local steps since the ranks' models were equal.
    """

    mode = "updates"
    takes_for_good = True

    def __init__(
        self, parts: SynchronizerParts, masters: MasterWeights, fragments: Fragments, outer: OuterStep | None
    ) -> None:
        super().__init__(parts)
        self.steps = 0
        self._masters, self._fragments, self._plan, self._outer = masters, fragments, fragments.plan, outer
        self._refusal: Exception | None = None  # travels with the buckets that are sent next
        self._owing: set[BucketReducer] = set()  # whose next copies begin with the errors of the last round
        self._common = CommonModel(in_vectors=self._overlap)
        self.agreement.common = self._common.values

    @property
    @override
    def models_differ(self) -> bool:
        return self.steps > 0

    @property
    @override
    def can_refuse(self) -> bool:
        # The other ranks make local steps without a call, and with overlap may have begun the next synchronization.
        return bool(self._plan.due(self._fragments.turn + 1))

    @override
    def _compare_models(self) -> None:
        try:
            super()._compare_models()
        except CollectiveMismatch:
            self._abandon_moves()  # to the common model, which a caller can broadcast
            raise

    def _step_aside(self, reducer: BucketReducer) -> None:
        """Let a bucket's parameters step aside, to copies less the errors that `synchronize` has left."""
        self._common.step_aside(reducer, self.reducers)
        if reducer in self._owing:
            self._subtract_errors(reducer)

    def _subtract_errors(self, reducer: BucketReducer) -> None:
        """Subtract the errors of the last round from copies: the next moves, and gradients before, include them."""
        self._owing.discard(reducer)
        frozen = {member.parameter for member in self._changes.frozen}
        for parameter, error in zip(reducer.parameters, reducer.left_out(), strict=True):
            if parameter not in frozen:
                parameter.data.sub_(error)

    @override
    def _open_buckets(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        self._fragments.deal(members)
        super()._open_buckets(members, algorithms)
        self._common.keep_aside(member.parameter for member in members)

    @override
    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the ranks' moves since the last synchronization, of all fragments; return at once without moves.

        The parameters then hold the common model, also where copies held errors, which the next copies begin with.
        """
        self._require_local("synchronize")
        if self.steps == 0 and not self._fragments.in_flight:
            return
        if problem := self._parameters.find_change():
            self.refuse(ValueError(f"{self.comm.here}: {problem}"))
        self._masters.refresh()
        self._common.step_aside_joining(member.parameter for member in self._changes.joining)
        try:
            if self._fragments.turn > 0 or not self._plan.is_whole:
                for number in range(self._plan.fragments):
                    self._synchronize_fragment(number, at_once=True)
            self._owing = {one for one in self.reducers if one.leaves_residual}
        finally:
            self._abandon_moves()

    def _synchronize_fragment(self, number: int, at_once: bool = False) -> None:
        """Average a fragment's moves, if there are some, and take the means, `at_once` or after the delay."""
        for flight in [one for one in self._fragments.in_flight if one.number == number]:
            self._apply(flight)
        intent, self._refusal = StepIntent(self._refusal), None
        if self._plan.is_whole:
            self._average(intent)
            self.synchronizations += 1
            return
        moved = [one for one in self._fragments.of(number, self.reducers) if self._common.has_moved(one)]
        if not moved:
            return
        if not self._plan.keeps_local:
            self._average(intent, self._fragments.of(number, self.reducers))
            self.synchronizations += 1
            return
        delay = 0 if at_once else self._plan.delay
        flight = FragmentInFlight(number, moved, delay, self.agreement.for_another_call(), intent.refusal)
        intent.refusal = None  # whose traceback may have this frame, and they would keep each other
        self._fragments.in_flight.append(flight)
        flight.start(self.comm, self._fill)
        if not delay:
            self._apply(flight)

    def _apply(self, flight: FragmentInFlight) -> None:
        """Take the means of a fragment, which are waited for."""
        self._fragments.in_flight.remove(flight)
        flight.settle()
        for reducer in flight.ended:
            self._take(reducer)
        if flight.failures:
            raise flight.failures.pop()  # in no variable: its traceback has this frame, and they would keep each other
        self.synchronizations += 1

    def _abandon_moves(self) -> None:
        self._refusal = None
        self._common.restore_all()
        self._masters.publish()
        self.steps = self._fragments.turn = 0

    def _require_local(self, call: str) -> None:
        if self._common.is_shown:
            raise RuntimeError(f"{self.comm.here}: {call}() within common_model(); leave that block first")

    @override
    @torch.no_grad()
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        if early:
            if self.steps == 0 or not self._common.has_moved(reducer):
                self._step_aside(reducer)
            with only(self._optimizer, reducer.parameters), self.inner_steps:
                self._optimizer.step()
            for member in reducer.bucket.members:
                self._early.sent.note([member])  # again, since optimizers may write to gradients
        if self._plan.keeps_local:
            for parameter, view in zip(reducer.parameters, reducer.vector_views, strict=True):
                torch.sub(self._common.values[parameter], parameter.data, out=view)
            return True
        local = [parameter.data for parameter in reducer.parameters]
        self._common.restore(reducer.parameters)
        # a bucket that starts during backward is taken later, when a scheduler may have changed the outer optimizer
        may_stay_packed = self._outer is None or (not early and self._outer.is_plain)
        reducer.take_moves([parameter.data for parameter in reducer.parameters], local, may_stay_packed)
        return True

    @override
    def _take(self, reducer: BucketReducer) -> None:
        aside = [parameter for parameter in reducer.parameters if parameter in self._common.values]
        local = [parameter.data for parameter in aside]
        if self._plan.keeps_steps:
            # small differences first: values less values, then the moves that were sent
            torch._foreach_sub_(local, [self._common.values[parameter] for parameter in aside])
            torch._foreach_add_(local, reducer.vector_views)
        self._common.restore(aside)
        with self._changes.keeping_frozen(reducer.parameters):
            if self._outer is None:
                reducer.subtract_mean()
            else:
                self._outer.move(reducer, [member.parameter for member in self._changes.frozen])
        if reducer.leaves_residual:
            self._common.step_aside(reducer, self.reducers)
            self._subtract_errors(reducer)
        own, common = self._plan.weights
        if local and own:
            torch._foreach_mul_(local, own)
            torch._foreach_add_(local, [parameter.data for parameter in aside], alpha=common)
            self._common.move_aside(aside, local)

    # States -----------------------------------------------------------------------------------------------------------

    @override
    def check_own(self, own: State) -> None:
        super().check_own(own)
        self._fragments.check_buckets(own["buckets"], own["rounds"])

    @override
    def load_own(self, own: State) -> None:
        self._require_local("load_state_dict")
        self._fragments.drop_in_flight()
        self._fragments.load_numbers(own["rounds"], self._changes.joining)
        super().load_own(own)

    @override
    def _save_rounds(self) -> State:
        common = self._common.named(self._members) if self.steps else {}
        # the turn does not follow from the steps where models differ behind a synchronization, too
        has_turn = not self._plan.is_whole or self.steps >= self._plan.local_steps
        return {
            "rounds": self.synchronizations,
            "steps": self.steps,
            "masters": {name: master.detach().clone() for name, master in self._named_masters().items()},
            "common": {name: one.clone() for name, one in common.items()},
            **({} if self._outer is None else {"outer": self._outer.state()}),
            **({"fragments": self._fragments.state()} if has_turn else {}),
            **({"owed": self._owed_errors()} if self._owing else {}),
        }

    @override
    def _check_rounds(self, rounds: State) -> None:
        UPDATE_ROUNDS.check(rounds)
        # a state from before a parameter joined lacks it
        joining = {one.name for one in self._changes.joining}
        lacking = joining - rounds["masters"].keys() - rounds["common"].keys()
        masters = {name: one for name, one in self._named_masters().items() if name not in lacking}
        parameters = {one.name: one.parameter for one in self._members if one.name not in lacking}
        common = parameters if rounds["steps"] else {}
        if "fragments" in rounds:
            # buckets are aside one by one
            common = {name: one for name, one in common.items() if name in rounds["common"]}
            self._fragments.check(rounds["fragments"], {one.name: one.parameter for one in self._members}, joining)
        UPDATE_ROUNDS.check_tensors(rounds, {"masters": masters, "common": common})
        if ("outer" in rounds) != (self._outer is not None):
            only_one = "state" if "outer" in rounds else "optimizer"
            raise ValueError(
                f"only one of state and optimizer has an outer optimizer, the {only_one}; pass the same outer="
            )
        if self._outer is not None:
            self._outer.check(rounds["outer"], joining)

    @override
    @torch.no_grad()
    def _load_rounds(self, rounds: State) -> None:
        super()._load_rounds(rounds)
        self.steps = rounds["steps"]
        if self._outer is not None:
            self._outer.load(rounds["outer"])
        self._common.forget_moves()
        owed = rounds.get("owed", {})
        self._owing = {one for one in self.reducers if one.leaves_residual and one.bucket.names[0] in owed}
        for name, error in self._owed_errors(copied=False).items():
            error.copy_(owed[name])
        for reducer in self.reducers:
            if reducer.bucket.names[0] in rounds["common"]:
                self._common.step_aside(reducer, self.reducers)
        saved = rounds["common"]
        self._common.step_aside_joining(one.parameter for one in self._changes.joining if one.name in saved)
        self._fragments.load(rounds, self.reducers, self.agreement)
        for here, of_state in ((self._named_masters(), rounds["masters"]), (self._common.named(self._members), saved)):
            for name, one in of_state.items():
                here[name].copy_(one)

    def _owed_errors(self, copied: bool = True) -> dict[str, Tensor]:
        """Return the errors that the next copies begin with, by name."""
        pairs = [pair for one in self._owing for pair in zip(one.bucket.names, one.left_out(), strict=True)]
        return {name: error.clone() if copied else error for name, error in pairs}

    def _named_masters(self) -> dict[str, Tensor]:
        masters = {id(master) for master in self._masters.masters}
        return {one.name: one.parameter for one in self._members if id(one.parameter) in masters}
