"""The "gradients" mode: the ranks average their gradients, then every rank makes the same optimizer step.

With overlap a bucket begins as soon as backward has brought its last gradient. The ranks begin buckets in one order, so
a bucket with a gradient that does not come keeps those behind it until the step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from collectives import Communicator
from collectives.errors import NonFiniteGradient
from mpicomp.torch.bucket_queue import InOrder
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.optimizer.gradient_hooks import Arrivals, listen
from mpicomp.torch.optimizer.step_agreement import StepAgreement
from mpicomp.torch.state.schema import require_counters


class GradientAveraging:
    """Replaces each parameter's gradient by its mean over the ranks.

    A missing gradient counts as zeros and is present afterwards, so that the optimizer does the same on all ranks.

    Parameters
    ----------
    reducers, comm
        The buckets, and the communicator of the ranks that average them.
    agreement
        Travels with one bucket of each step.
    overlap
        Whether buckets begin during backward.
    passes
        How often backward adds to each gradient before it is averaged.

    Attributes
    ----------
    models_compared
        The ranks have compared their models, in a step. Buckets begin during backward only from then on.
    """

    models_differ = False
    """The ranks' models are always equal."""

    def __init__(
        self,
        reducers: BucketReducers,
        comm: Communicator,
        agreement: StepAgreement,
        overlap: bool,
        passes: int,
    ) -> None:
        self.reducers = reducers
        self.synchronizations = 0
        self.models_compared = False
        self.arrivals = Arrivals([member.name for member in reducers.members], passes)
        self._comm, self._overlap = comm, overlap
        self.agreement = agreement
        self._averaged = self._scaled = self._dropped = False
        self._error: NonFiniteGradient | None = None  # of gradients that were averaged ahead of the step
        self._queue = InOrder(reducers, comm, self._fill, agreement)
        # Freed together before the next backward: memory freed here would go back to the system, and be cleared anew
        self._replaced: list[Tensor | None] = []
        listen(self, [member.parameter for member in reducers.members])

    @property
    def in_flight(self) -> bool:
        """Whether gradients of this step have been sent, or may have been on another rank."""
        return self._begins_early and self.to_be_averaged

    @property
    def to_be_averaged(self) -> bool:
        """Whether gradients of this step have come, and whoever looks at them is to find their mean."""
        return self._overlap and self.arrivals.any_complete and not self._averaged

    can_refuse = True
    """A refusal of a step whose gradients are not averaged yet reaches the other ranks in that step."""

    @property
    def averaged(self) -> bool:
        """Flag: the gradients are the ranks' mean already, and the next step takes them."""
        return self._averaged

    @property
    def _begins_early(self) -> bool:
        """Flag: buckets begin during backward. The last one, which may be the only one, waits for the step."""
        early = self._overlap and self.models_compared and not self.arrivals.overtaken
        return early and len(self.reducers) > 1

    def gradient_came(self, position: int) -> None:
        """Begin the buckets that this gradient completes; called by hooks during backward."""
        if self._scaled:  # the scaler has skipped the step, which this is not told
            self.drop_gradients(set_to_none=True)
        self._dropped = False
        self._replaced.clear()
        sent = self._averaged or self._begins_early
        if self.arrivals.complete(position, sent) and self.in_flight:
            self._queue.complete(position)

    def begin_step(self) -> None:
        """Nothing: the model is the common one."""

    def before_evaluation(self) -> None:
        """Forget what `synchronize` averaged: a closure is about to make new gradients."""
        self._averaged = False
        self.arrivals.restart()

    def before_scaler(self) -> None:
        """Average ahead of the search for infinities in the gradients, so that all ranks find the same."""
        if self._scaled:
            return
        self.synchronize()
        self._scaled = True

    def take_gradients(self) -> None:
        """Average the gradients, which are there now, unless `synchronize` has.

        Raises
        ------
        NonFiniteGradient
            A rank had NaN or infinity. With a GradScaler, which then skips the step, the gradients become None instead.
        """
        self.synchronize()
        self._averaged = False
        error, self._error = self._error, None
        scaled, self._scaled = self._scaled, False
        self.arrivals.restart()
        if error is not None and not scaled:
            try:
                raise error
            finally:
                del error  # its traceback has this frame, and they would keep each other
        if error is not None:
            for member in self.reducers.members:
                member.parameter.grad = None  # which optimizers pass over

    def stepping(self) -> AbstractContextManager[None]:
        """What surrounds the optimizer's step: nothing."""
        return nullcontext()

    def end_step(self) -> None:
        """No-op. The gradients were averaged before the step."""

    def fail_step(self) -> None:
        """No-op. The model is the common one."""

    def refuse(self, error: Exception) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that make the step; no rank makes it."""
        self.arrivals.restart()
        try:
            if self._overlap and self.models_compared and self.reducers:  # else the others compare models first
                self._queue.finish(refusal=error)
            self._comm.reject(error, "an optimizer step")
        finally:
            del error  # its traceback has this frame, and they would keep each other

    def drop_step(self) -> None:
        """Forget gradients that have been sent; collective.

        Raises
        ------
        CollectiveMismatch
            Other ranks make the step.
        """
        self.arrivals.restart()
        self._dropped = True
        self._queue.finish(drops=True)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the gradients now, for the step to come; once is enough.

        Where a rank has NaN or infinity the gradients hold NaN on all, and the step raises the error.
        """
        if self._averaged:
            return
        self.reducers.lay_out(self.arrivals.order)
        self._replaced.clear()
        ended: list[BucketReducer] = []
        try:
            if self._overlap:
                self._finish(ended)
            else:
                self._average_one_by_one(ended)
        except BaseException as error:
            for reducer in ended:
                reducer.undo()
            if not isinstance(error, NonFiniteGradient):
                self.arrivals.restart()
                raise
            self._error = error
        if self._error is not None:
            for member in self.reducers.members:
                if member.parameter.grad is not None:
                    member.parameter.grad.fill_(float("nan"))
        self.synchronizations += self._error is None
        self._averaged = True

    def _finish(self, ended: list[BucketReducer]) -> None:
        """Average the buckets that have not begun, and take the means of all."""

        def take(reducer: BucketReducer) -> None:
            ended.append(reducer)
            self._show_mean(reducer)

        self._queue.finish(take, self._find_refusal(), emptied=self._is_emptied())

    def _average_one_by_one(self, ended: list[BucketReducer]) -> None:
        emptied = self._is_emptied()
        for reducer in self.reducers:
            first = reducer is self.reducers[0]
            if first:
                self.agreement.attach(reducer.aggregator, emptied=emptied)
            try:
                sent = self._fill_alone(reducer)
            except ValueError as error:
                self._comm.reject(error, "averaging gradients")
            if sent:
                reducer.aggregate()
                ended.append(reducer)
            if first:
                self.agreement.conclude(emptied=emptied)
            if sent:
                self._take_mean(reducer)

    def _find_refusal(self) -> Exception | None:
        """Why this rank cannot make the step with the gradients that are there."""
        name = self._queue.find_change()
        if name:
            return RuntimeError(
                f"{self._comm.here}: the gradient of {name!r} was changed or dropped between backward() and step(), "
                "after it was sent; no rank has made this step. Call optimizer.synchronize() before clipping or other "
                "changes, and zero_grad() after step(), or pass overlap=False; a model in DistributedDataParallel, "
                "which averages by itself, takes ddp_hook instead"
            )
        return None

    def _is_emptied(self) -> bool:
        """Return True if `zero_grad` has dropped the gradients of this step and no others came; call it once a step."""
        dropped, self._dropped = self._dropped, False
        return dropped and all(member.parameter.grad is None for member in self.reducers.members)

    def drop_gradients(self, set_to_none: bool) -> None:
        """Forget that they were averaged; the optimizer, which holds the model's own parameters, clears them."""
        self._dropped |= self.arrivals.any_complete and not self._averaged
        self._averaged = self._scaled = False
        self._error = None
        self._replaced.clear()
        self.arrivals.restart()

    def state_dict(self) -> dict[str, Any]:
        """The counter."""
        return {"rounds": self.synchronizations}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError if `state` is none that `load_state_dict` takes."""
        require_counters(state, "rounds")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.synchronizations = state["rounds"]
        self._dropped = False

    @torch.no_grad()
    def _fill(self, reducer: BucketReducer) -> bool:
        """See `mpicomp.torch.bucket_queue.Fill`."""
        return self._fill_alone(reducer, behind=True)

    def _fill_alone(self, reducer: BucketReducer, behind: bool = False) -> bool:
        gradients = self._gradients(reducer)
        if reducer.take_alone(gradients, behind):
            return False
        torch._foreach_copy_(reducer.vector_views, gradients)
        return True

    def _gradients(self, reducer: BucketReducer) -> list[Tensor]:
        return [self._gradient(member) for member in reducer.bucket.members]

    @staticmethod
    def _take_mean(reducer: BucketReducer) -> None:
        gradients = [parameter.grad for parameter in reducer.parameters if parameter.grad is not None]  # all are there
        torch._foreach_copy_(gradients, reducer.mean_views)

    def _show_mean(self, reducer: BucketReducer) -> None:
        """Let the gradients be views of the mean, which spares a copy; vectors must not be shared with others."""
        for parameter, mean in zip(reducer.parameters, reducer.fresh_mean_views(), strict=True):
            if parameter.grad is not None and parameter.grad.stride() != mean.stride():  # a layout of its own: keep it
                parameter.grad.copy_(mean)
            else:
                self._replaced.append(parameter.grad)
                parameter.grad = mean

    def _gradient(self, member: NamedParameter) -> Tensor:
        parameter = member.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout != torch.strided:
            raise ValueError(
                f"{self._comm.here}: the gradient of {member.name!r} is sparse, which cannot be averaged element by "
                'element; build its layer with sparse=False or use synchronize="updates"'
            )
        return parameter.grad
