"""The "updates" mode: each rank's optimizer moves its own copy of the model, then the ranks average the moves.

From the common model x, H optimizer steps lead to x_local. The synchronization after them makes
x <- x - aggregate(x - x_local) and x_local <- x; or an outer optimizer moves x by the aggregated update
(`outer_step.py`). At the first step after a synchronization the parameters are given a copy of x in other memory (they
step aside), and the optimizer moves that; x stays where it was, and they return to it.

With overlap the last local step is made bucket by bucket while backward runs: as soon as backward has brought a
bucket's gradients, the optimizer moves its parameters, and their move begins to be averaged.

A synchronization that fails leaves the common model on every rank, and so does the first step after one. The common
model has then moved by the means of the buckets that did not fail: those before the failed one, or with overlap all
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from collectives.annotations import override
from collectives.caller_warning import warn_caller
from collectives.consistency.descriptions import fingerprint
from collectives.errors import CollectiveError, CollectiveMismatch, marked
from mpicomp.algorithms import Algorithm
from mpicomp.torch.bucket_reducers import BucketReducer
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.devices import all_finite
from mpicomp.torch.optimizer.common_model import CommonModel
from mpicomp.torch.optimizer.fragments import FragmentInFlight, Fragments
from mpicomp.torch.optimizer.islands import IslandGradients
from mpicomp.torch.optimizer.outer_step import OuterStep, only
from mpicomp.torch.optimizer.second_views import warn_of_second_views
from mpicomp.torch.optimizer.step_agreement import StepIntent
from mpicomp.torch.optimizer.synchronizer import Closure, Phase, Synchronizer, SynchronizerParts
from mpicomp.torch.parameters import MasterWeights
from mpicomp.torch.state.schema import UPDATE_ROUNDS, State


class LocalUpdates(Synchronizer):
    """Counts local steps, and averages the moves of each of the `fragments` in its own steps.

    With `overlap` the last local step is made during backward.

    Gradients are averaged within the `island` in every step.

    The optimizer of `outer` moves the common model by the aggregated updates; None: they are subtracted.

    With `skip_nonfinite` all ranks skip a step for which the gradients of one hold NaN or infinity: momentum would keep
    them.
    """

    mode = "updates"
    late_change = (
        "the optimizer had moved the parameter by it; no rank has made this step. Pass overlap=False to clip it, and "
        "call zero_grad() after step()"
    )
    takes_for_good = True

    def __init__(
        self,
        parts: SynchronizerParts,
        masters: MasterWeights,
        fragments: Fragments,
        outer: OuterStep | None,
        island: IslandGradients | None,
        skip_nonfinite: bool,
    ) -> None:
        super().__init__(parts)
        self.steps = 0  # since the ranks' models were equal
        self._fragments, self._plan, self._outer, self._island = fragments, fragments.plan, outer, island
        self._masters, self._skip_nonfinite = masters, skip_nonfinite
        self._first: Sequence[BucketReducer] = ()  # those for which this is the first step after a synchronization
        self._refusal: Exception | None = None  # travels with the buckets that are sent next
        self._finite: bool | None = None  # verdict on the gradients of this step; None: not searched
        self._owing: set[BucketReducer] = set()  # whose next copies begin with the errors of the last round
        self._warned = False
        self._searched = False  # for second views, behind the first step
        self._common = CommonModel(in_vectors=self._overlap)
        self.agreement.common = self._common.values
        self._watch_gradients(0)

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
    def _common_values(self) -> dict[str, Tensor]:
        return {**super()._common_values(), **self._common.named(self._members)}

    @override
    def _compare_models(self) -> None:
        try:
            super()._compare_models()
        except CollectiveMismatch:
            self._abandon_moves()  # to the common model, which a caller can broadcast
            raise

    @override
    def gradient_came(self, position: int) -> None:
        self._scaled = False  # if the scaler has skipped the step, which no call reports
        super().gradient_came(position)
        if self._fragments.in_flight:
            self.comm.calls.advance()

    @override
    def step(self, closure: Closure | None) -> float | None:
        self._require_local("step")
        if closure is not None and self._overlap:
            text = f'{self.comm.here}: a closure cannot be combined with overlap under "updates"; pass overlap=False'
            self.refuse(ValueError(text))
        return super().step(closure)

    @override
    @contextmanager
    def _stepping(self) -> Iterator[None]:
        try:
            self._step_aside_if_first()
            yield
        except BaseException:
            self._refusal = None
            self._return_to_start()
            raise
        self._restart(Phase.STEPPED)
        self._scaled = False
        if self._finite is False:
            self._return_to_start()
            return
        self._count_step()

    @torch.no_grad()
    def _count_step(self) -> None:
        """Count a local step, apply the means that are due after it, and send the fragments that are."""
        if not self._searched and self.comm.size > 1:
            warn_of_second_views(self._optimizer, self.comm.here)
        self._searched = True
        self.steps += 1
        arrived = self._fragments.count_step()
        try:
            for flight in arrived:
                self._apply(flight)
            for number in self._plan.due(self._fragments.turn):
                self._synchronize_fragment(number)
        except BaseException:
            self._abandon_moves()
            raise
        if not self._common.values:
            self.steps = 0
        self._masters.publish()

    @torch.no_grad()
    def _step_aside_if_first(self) -> None:
        """Let the parameters step aside for which this is the first step after a synchronization."""
        self._masters.refresh()  # a loop may change parameters between any two steps
        self.reducers.lay_out(self.gradient_counts.order)
        if not self._scaled:
            self._finite = None
        here = self.reducers[self._queue.n_started :]
        self._first = [one for one in here if self.steps == 0 or not self._common.has_moved(one)]
        for reducer in self._first:
            self._step_aside(reducer)
        joining = [member.parameter for member in self._changes.joining]
        self._common.restore_all_joining_but(joining)
        self._common.step_aside_joining(joining)

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

    def _return_to_start(self) -> None:
        """Return to where the step began: the common model, where the step is the first after a synchronization."""
        first = {parameter for reducer in self._first for parameter in reducer.parameters}
        self._common.restore([one for one in self._common.values if self.steps == 0 or one in first])
        self._masters.publish()  # a closure may have seen them moved

    @override
    def _open_buckets(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        self._fragments.deal(members)
        super()._open_buckets(members, algorithms)
        self._common.keep_aside(member.parameter for member in members)

    @override
    def _evaluate(self, closure: Closure) -> float:
        self._masters.publish()  # the optimizer has moved the masters since the closure was last called
        return closure()

    @override
    def show_gradients(self) -> None:
        if not self._scaled and self.phase is not Phase.SENT:
            self._masters.show_gradients()

    @override
    def prepare_for_scaler(self) -> None:
        if self._scaled:
            return
        if self._overlap:
            raise RuntimeError(
                f'{self.comm.here}: a GradScaler cannot be combined with overlap under "updates", where backward has '
                "moved the parameters by scaled gradients; pass overlap=False"
            )
        self.reducers.lay_out(self.gradient_counts.order)
        self._take_own_gradients()
        self._scaled = True
        self._finite = self._are_all_finite()
        if not self._finite:
            for gradient in self._gradients():
                (gradient._values() if gradient.is_sparse else gradient).fill_(float("nan"))

    @override
    def _take_gradients(self) -> None:
        """Hand the gradients, which are there now, to the masters; drop them all if the step is to be skipped."""
        self._refusal = self._refusal or self._find_refusal()  # before the optimizer, which may write to gradients
        if not self._scaled:
            self._take_own_gradients()
        elif self._masters.gradients_changed:
            error = RuntimeError(
                f"{self.comm.here}: gradients of 16-bit parameters were changed between scaler.unscale_(optimizer) "
                "and step(), which uses float32 copies of them: clip the optimizer's parameters, "
                "[p for group in optimizer.param_groups for p in group['params']], instead of the model's"
            )
            self.comm.reject(error, "an optimizer step")
        # once a step: a closure may be called more often on one rank than on another
        if self._skip_nonfinite and self._finite is None:
            self._finite = self._are_all_finite(warn=True)
        if self._finite is False:
            self.drop_gradients(set_to_none=True)
            for member in self._members:
                member.parameter.grad = None  # optimizers pass over the parameter
        if self._changes.frozen:
            started = self.reducers[: self._queue.n_started]
            self._changes.drop_frozen_gradients({parameter for one in started for parameter in one.parameters})

    def _take_own_gradients(self) -> None:
        """Hand the gradients to the masters, and average them within the island if there is one."""
        try:
            self._masters.take_gradients_of_step()
        except RuntimeError as error:
            changed = RuntimeError(f"{self.comm.here}: {error}")
            if self._island is not None:
                self._island.reject(changed)
            self.comm.reject(changed, "an optimizer step")
        if self._island is not None:
            self._island.average(self._members)

    @override
    def _without_moved(self) -> AbstractContextManager[None]:
        n_started = self._queue.n_started
        if not n_started:
            return nullcontext()
        here = [p for reducer in self.reducers[n_started:] for p in reducer.parameters]
        return only(self._optimizer, (*here, *(member.parameter for member in self._changes.joining)))

    @override
    @torch.no_grad()
    def refuse(self, error: Exception) -> None:
        """Raise `error` here, and CollectiveMismatch on the ranks that make the step; all have the common model then.

        Local steps are kept where all ranks refuse for the same reason in a step that does not synchronize. Where the
        others first wait for this rank's gradients in their island, or apply a fragment later, the refusal travels with
        the buckets, and all ranks raise where these are taken.
        """
        if self._plan.keeps_local or self._island is not None:
            self._refusal = error
            return
        self._restart()
        if self._starts_early:  # on all ranks or on none: it does not depend on the gradients that have come here
            try:
                self._average(StepIntent(refusal=error))
            finally:
                self._abandon_moves()
        reason = f"rejects an optimizer step: {error}"
        text = reason.replace(self.comm.here, "")
        try:
            self.comm.agree(fingerprint(text), lambda: f"rank {self.comm.rank} {reason}")
        except CollectiveError:
            self._abandon_moves()
        try:
            raise marked(error)
        finally:
            del error  # its traceback has this frame, and they would keep each other

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

    @override
    @contextmanager
    def common_model(self) -> Iterator[None]:
        """Let the parameters hold the common model for a while."""
        self._require_local("common_model")
        counts = self.gradient_counts
        paused, counts.paused = counts.paused, True
        try:
            with self._common.shown():
                self._masters.publish()
                yield
        finally:
            self._masters.publish()
            counts.paused = paused

    def _require_local(self, call: str) -> None:
        if self._common.is_shown:
            raise RuntimeError(f"{self.comm.here}: {call}() within common_model(); leave that block first")

    @override
    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients that the optimizer cannot see, because it holds masters in their place."""
        self._masters.drop_gradients(set_to_none)
        self._scaled = False
        self._restart()

    @override
    @torch.no_grad()
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        if early:
            if self.steps == 0 or not self._common.has_moved(reducer):
                self._step_aside(reducer)
            with only(self._optimizer, reducer.parameters), self.inner_steps:
                self._optimizer.step()
            for member in reducer.bucket.members:
                self._sent.note([member])  # again, since optimizers may write to gradients
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

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (member.parameter for member in self._members)
        return (parameter.grad for parameter in parameters if parameter.grad is not None)

    @property
    def _members(self) -> tuple[NamedParameter, ...]:
        """The parameters with a bucket, and those that join."""
        return *self.reducers.members, *self._changes.joining

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

    def _are_all_finite(self, warn: bool = False) -> bool:
        """Return True, on all ranks, if no rank's gradients hold NaN or infinity; else warn the first time."""
        comm, text = self.comm, "the check of gradients before an optimizer step"
        comm.agree(fingerprint(text), lambda: text)
        flags = np.zeros(comm.size, np.int64)
        flags[comm.rank] = not all_finite(self._gradients())
        ranks = np.flatnonzero(comm.allreduce(flags))
        if ranks.size and warn and not self._warned:
            self._warned = True
            warn_caller(
                f"rank {comm.rank} of {comm.size}: this step and others like it are skipped, as the gradients of "
                f"{len(ranks)} rank(s), the first of them rank {ranks[0]}, hold NaN or infinity"
            )
        return not ranks.size
