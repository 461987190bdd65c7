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

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from collectives.annotations import override
from collectives.consistency.descriptions import fingerprint
from collectives.errors import CollectiveError, marked
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.local_steps.finite_gradients import FiniteGradients
from mpicomp.torch.local_steps.fragments import Fragments
from mpicomp.torch.local_steps.islands import IslandGradients
from mpicomp.torch.local_steps.local_moves import LocalMoves
from mpicomp.torch.local_steps.outer_step import OuterStep, only
from mpicomp.torch.local_steps.second_views import warn_of_late_views
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.synchronizer.bucket_averaging import SynchronizerParts
from mpicomp.torch.synchronizer.step_agreement import StepIntent
from mpicomp.torch.synchronizer.synchronizer import Closure, Phase


class LocalUpdates(LocalMoves):
    """Counts local steps, and averages the moves of each of the `fragments` in its own steps.

    With `overlap` the last local step is made during backward.

    Gradients are averaged within the `island` in every step.

    With `skip_nonfinite` all ranks skip a step for which the gradients of one hold NaN or infinity: momentum would keep
    them.
    """

    late_change = (
        "the optimizer had moved the parameter by it; no rank has made this step. Pass overlap=False to clip it, and "
        "call zero_grad() after step()"
    )

    def __init__(
        self,
        parts: SynchronizerParts,
        masters: MasterWeights,
        fragments: Fragments,
        outer: OuterStep | None,
        island: IslandGradients | None,
        skip_nonfinite: bool,
    ) -> None:
        super().__init__(parts, masters, fragments, outer)
        self._island = island
        self._island_came = False  # the means of this step's gradients, by which the island counts this rank's step
        self._finite = FiniteGradients(parts.comm, skip_nonfinite)
        self._first: Sequence[BucketReducer] = ()  # those for which this is the first step after a synchronization
        self._searched = False  # for second views, after the first step
        self._watch_gradients(0)

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
        self._island_came &= self._scaled  # a scaler has had the means made
        try:
            self._step_aside_if_first()
            yield
        except BaseException as error:
            if self._island_came and self._island is not None and not isinstance(error, CollectiveError):
                # the others of the island have made this step, and no later one of this rank is the same
                self._island.give_up(error)
            self._refusal = None
            self._return_to_start()
            raise
        self._restart(Phase.STEPPED)
        self._scaled = self._island_came = False
        if self._finite.verdict is False:
            self._return_to_start()
            return
        self._count_step()

    @torch.no_grad()
    def _count_step(self) -> None:
        """Count a local step, apply the means that are due after it, and send the fragments that are."""
        if not self._searched and self.comm.size > 1:
            warn_of_late_views(self._optimizer, self.comm.here)
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
            self._finite.verdict = None
        here = self.reducers[self._early.queue.n_started :]
        self._first = [one for one in here if self.steps == 0 or not self._common.has_moved(one)]
        for reducer in self._first:
            self._step_aside(reducer)
        joining = [member.parameter for member in self._changes.joining]
        self._common.restore_all_joining_but(joining)
        self._common.step_aside_joining(joining)

    def _return_to_start(self) -> None:
        """Return to where the step began: the common model, where the step is the first after a synchronization."""
        first = {parameter for reducer in self._first for parameter in reducer.parameters}
        self._common.restore([one for one in self._common.values if self.steps == 0 or one in first])
        self._masters.publish()  # a closure may have seen them moved

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
        if not self._finite.search(self._gradients()):
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
        if self._finite.skips and self._finite.verdict is None:
            self._finite.search(self._gradients(), warn=True)
        if self._finite.verdict is False:
            self.drop_gradients(set_to_none=True)
            for member in self._members:
                member.parameter.grad = None  # optimizers pass over the parameter
        if self._changes.frozen:
            started = self.reducers[: self._early.queue.n_started]
            sent = {parameter for reducer in started for parameter in reducer.parameters}
            self._changes.drop_frozen_gradients(sent)

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
            self._island_came |= self._island.average(self._members)

    @override
    def _without_moved(self) -> AbstractContextManager[None]:
        n_started = self._early.queue.n_started
        if not n_started:
            return nullcontext()
        unmoved = [parameter for reducer in self.reducers[n_started:] for parameter in reducer.parameters]
        return only(self._optimizer, (*unmoved, *(member.parameter for member in self._changes.joining)))

    @override
    def _refuse_failed(self, error: RuntimeError) -> None:
        # where the others wait for any step of this rank, one that the loop repeats leaves nothing behind
        if not (self._plan.keeps_local or self._island is not None):
            super()._refuse_failed(error)

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
        mark, text = fingerprint(reason.replace(self.comm.here, "")), f"rank {self.comm.rank} {reason}"
        try:
            self.comm.agree(mark, lambda: text)
        except CollectiveError:
            self._abandon_moves()
        try:
            raise marked(error)
        finally:
            del error  # its traceback has this frame, and they would keep each other

    @override
    @contextmanager
    def common_model(self) -> Iterator[None]:
        """Let the parameters hold the common model for a while."""
        self._require_local("common_model")
        try:
            with self.gradient_counts.pause(), self._common.shown():
                self._masters.publish()
                yield
        finally:
            self._masters.publish()

    @override
    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients that the optimizer cannot see, because it holds masters in their place."""
        self._masters.drop_gradients(set_to_none)
        self._scaled = False
        self._restart()

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (member.parameter for member in self._members)
        return (parameter.grad for parameter in parameters if parameter.grad is not None)
