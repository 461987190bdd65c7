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

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from collectives.annotations import override
from collectives.consistency.descriptions import fingerprint
from collectives.errors import CollectiveError, marked
from mpicomp.torch.bucket_reducers import BucketReducer
from mpicomp.torch.devices import all_finite
from mpicomp.torch.optimizer.gradient_hooks import install_hooks
from mpicomp.torch.optimizer.outer_step import OuterStep, only
from mpicomp.torch.optimizer.step_agreement import StepIntent
from mpicomp.torch.optimizer.synchronizer import Closure, Phase, Synchronizer, SynchronizerParts
from mpicomp.torch.parameters import MasterWeights
from mpicomp.torch.state.schema import UPDATE_ROUNDS, State


class LocalUpdates(Synchronizer):
    """Counts local steps, and averages their moves after `local_steps` of them.

    With `overlap` the last local step is made during backward.

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
        local_steps: int,
        outer: OuterStep | None,
        skip_nonfinite: bool,
    ) -> None:
        super().__init__(parts)
        self.steps = 0  # since the last synchronization
        self._masters, self._local_steps, self._skip_nonfinite = masters, local_steps, skip_nonfinite
        self._outer = outer
        self._finite: bool | None = None  # verdict on the gradients of this step; None: not searched
        self._warned = False
        self._aside: list[list[Tensor]] = []  # memory besides the common model, of each bucket, like its parameters
        self._common: dict[Tensor, Tensor] = {}  # the common model, by the parameters that are aside
        self.agreement.common = self._common
        install_hooks(self, [member.parameter for member in parts.parameters.trained])  # the model's own

    @property
    @override
    def models_differ(self) -> bool:
        return self.steps > 0

    @property
    @override
    def can_refuse(self) -> bool:
        # The other ranks make local steps without a call, and with overlap may have begun the next synchronization.
        return self.steps + 1 >= self._local_steps

    @override
    def gradient_came(self, position: int) -> None:
        self._scaled = False  # if the scaler has skipped the step, which no call reports
        super().gradient_came(position)

    @override
    def step(self, closure: Closure | None) -> float | None:
        if closure is not None and self._overlap:
            raise ValueError(
                f'{self.comm.here}: a closure cannot be combined with overlap under "updates"; pass overlap=False'
            )
        return super().step(closure)

    @override
    @contextmanager
    def _stepping(self) -> Iterator[None]:
        try:
            self._step_aside_if_first()
            yield
        except BaseException:
            self._return_to_start()
            raise
        self._restart(Phase.STEPPED)
        self._scaled = False
        if self._finite is False:
            self._return_to_start()
            return
        self.steps += 1
        if self.steps >= self._local_steps:  # more, where a state saved with more local steps was loaded
            self.synchronize()
        else:
            self._masters.publish()

    @torch.no_grad()
    def _step_aside_if_first(self) -> None:
        """Let the parameters step aside if this is the first step after a synchronization."""
        self.reducers.lay_out(self.gradient_counts.order)
        if not self._scaled:
            self._finite = None
        if self.steps == 0:
            self._masters.refresh()
            for reducer in self.reducers[self._queue.n_started :]:
                self._step_aside(reducer)

    def _return_to_start(self) -> None:
        """Return to where the step began: the common model, if the step is the first one after a synchronization."""
        if self.steps == 0:
            self._restore_common(tuple(self._common))

    @override
    def _evaluate(self, closure: Closure) -> float:
        self._masters.publish()  # the optimizer has moved the masters since the closure was last called
        return closure()

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
        self._masters.take_gradients()
        self._scaled = True
        self._finite = self._are_all_finite()
        if not self._finite:
            for gradient in self._gradients():
                (gradient._values() if gradient.is_sparse else gradient).fill_(float("nan"))

    @override
    def _take_gradients(self) -> None:
        """Hand the gradients, which are there now, to the masters; drop them all if the step is to be skipped."""
        if not self._scaled:
            self._masters.take_gradients()
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
            for reducer in self.reducers:
                for parameter in reducer.parameters:
                    parameter.grad = None  # optimizers pass over the parameter

    @override
    def _without_moved(self) -> AbstractContextManager[None]:
        n_started = self._queue.n_started
        if not n_started:
            return nullcontext()
        return only(self._optimizer, (p for reducer in self.reducers[n_started:] for p in reducer.parameters))

    @override
    @torch.no_grad()
    def refuse(self, error: Exception) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that make the step; all have the common model then.

        Local steps are kept where all ranks refuse for the same reason in a step that does not synchronize.
        """
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
        """Average the ranks' moves since the last synchronization; return at once if they made no step."""
        if self.steps == 0:
            return
        try:
            self._average(StepIntent(self._find_refusal()))
            self.synchronizations += 1
        finally:
            self._abandon_moves()

    def _abandon_moves(self) -> None:
        self._restore_common(tuple(self._common))
        self._masters.publish()
        self.steps = 0

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
            if self.steps == 0:
                self._step_aside(reducer)
            with only(self._optimizer, reducer.parameters):
                self._optimizer.step()
        local = [parameter.data for parameter in reducer.parameters]
        self._restore_common(reducer.parameters)
        may_stay_packed = self._outer is None or self._outer.is_plain
        reducer.take_moves([parameter.data for parameter in reducer.parameters], local, may_stay_packed)
        return True

    @override
    def _take(self, reducer: BucketReducer) -> None:
        if self._outer is None:
            reducer.subtract_mean()
        else:
            self._outer.move(reducer)

    def _step_aside(self, reducer: BucketReducer) -> None:
        """Give the parameters a copy of themselves in other memory, for the optimizer to move."""
        if not self._aside:
            self._aside = [self._memory_aside(one) for one in self.reducers]
        self._restore_common(
            one for one in reducer.parameters if one in self._common
        )  # from a step that failed in backward
        aside = self._aside[reducer.bucket.index]
        torch._foreach_copy_(aside, reducer.parameters)
        for parameter, one in zip(reducer.parameters, aside, strict=True):
            self._common[parameter], parameter.data = parameter.data, one

    def _memory_aside(self, reducer: BucketReducer) -> list[Tensor]:
        """Return the reducer's own vector if no other shares it, and new memory for other orders of elements."""
        pairs = zip(reducer.parameters, reducer.fresh_vector_views(), strict=True)
        return [view if self._overlap and one.is_contiguous() else torch.empty_like(one) for one, view in pairs]

    def _restore_common(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.data = self._common.pop(parameter)

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (parameter for reducer in self.reducers for parameter in reducer.parameters)
        return (parameter.grad for parameter in parameters if parameter.grad is not None)

    @override
    def _save_rounds(self) -> State:
        return {
            "rounds": self.synchronizations,
            "steps": self.steps,
            "masters": {name: master.detach().clone() for name, master in self._named_masters().items()},
            "common": {name: view.clone() for name, view in self._named_common().items()} if self.steps else {},
            **({} if self._outer is None else {"outer": self._outer.state()}),
        }

    @override
    def _check_rounds(self, rounds: State) -> None:
        UPDATE_ROUNDS.check(rounds)
        parameters = {member.name: member.parameter for member in self.reducers.members}
        common = parameters if rounds["steps"] else {}
        UPDATE_ROUNDS.check_tensors(rounds, {"masters": self._named_masters(), "common": common})
        if ("outer" in rounds) != (self._outer is not None):
            with_it, without = ("state", "optimizer") if "outer" in rounds else ("optimizer", "state")
            raise ValueError(f"the {with_it} has an outer optimizer, and the {without} has none; pass the same outer=")
        if self._outer is not None:
            self._outer.check(rounds["outer"])

    @override
    @torch.no_grad()
    def _load_rounds(self, rounds: State) -> None:
        super()._load_rounds(rounds)
        self.steps = rounds["steps"]
        if self._outer is not None:
            self._outer.load(rounds["outer"])
        for parameter, common in self._common.items():
            common.copy_(parameter)  # which has been loaded, or is going to be
        self._restore_common(tuple(self._common))
        self._aside.clear()
        if self.steps:
            for reducer in self.reducers:
                self._step_aside(reducer)
        for here, saved in ((self._named_masters(), rounds["masters"]), (self._named_common(), rounds["common"])):
            for name, one in saved.items():
                here[name].copy_(one)

    def _named_masters(self) -> dict[str, Tensor]:
        masters = {id(master) for master in self._masters.masters}
        return {one.name: one.parameter for one in self.reducers.members if id(one.parameter) in masters}

    def _named_common(self) -> dict[str, Tensor]:
        members = self.reducers.members
        return {one.name: self._common[one.parameter] for one in members if one.parameter in self._common}

    def _are_all_finite(self, warn: bool = False) -> bool:
        """Return True, on all ranks, if no rank's gradients hold NaN or infinity; else warn the first time."""
        comm, text = self.comm, "the check of gradients before an optimizer step"
        comm.agree(fingerprint(text), lambda: text)
        flags = np.zeros(comm.size, np.int64)
        flags[comm.rank] = not all_finite(self._gradients())
        ranks = np.flatnonzero(comm.allreduce(flags))
        if ranks.size and warn and not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {comm.rank} of {comm.size}: this step and others like it are skipped, as the gradients of "
                f"{len(ranks)} rank(s), the first of them rank {ranks[0]}, hold NaN or infinity",
                RuntimeWarning, stacklevel=5,
            )  # fmt: skip
        return not ranks.size
