"""The "gradients" mode: the ranks average their gradients, then every rank makes the same optimizer step.

With overlap a bucket starts as soon as backward has brought its last gradient. The ranks start buckets in one order, so
a bucket with a gradient that does not come keeps the buckets behind it until the step.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from collectives.annotations import override
from collectives.errors import NonFiniteGradient, reword
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.parameters import NamedParameter, require_own_gradients
from mpicomp.torch.state.schema import State
from mpicomp.torch.synchronizer.bucket_averaging import SynchronizerParts
from mpicomp.torch.synchronizer.step_agreement import StepIntent
from mpicomp.torch.synchronizer.synchronizer import Closure, Phase, Synchronizer


class GradientAveraging(Synchronizer):
    """Replaces each parameter's gradient by its mean over the ranks.

    A missing gradient counts as zeros and is present afterwards, so that the optimizer does the same on all ranks. That
    of a parameter that all ranks have frozen is dropped afterwards, so that the optimizer passes over it.
    """

    mode = "gradients"
    late_change = (
        "it was sent; no rank has made this step. Call optimizer.synchronize() before clipping or other changes, and "
        "zero_grad() after step(), or pass overlap=False; a model in DistributedDataParallel, which averages by "
        "itself, takes ddp_hook instead"
    )

    def __init__(self, parts: SynchronizerParts) -> None:
        super().__init__(parts)
        self._errors: list[NonFiniteGradient] = []  # that of gradients that were averaged ahead of the step
        # freed together before the next backward: memory freed here would return to the system, and be cleared again
        self._replaced: list[Tensor | None] = []
        self._watch_gradients(0)

    @property
    @override
    def awaits_averaging(self) -> bool:
        return self._overlap and self.gradient_counts.any_complete and self.phase is not Phase.AVERAGED

    @override
    def _begin_gradients(self) -> None:
        if self._scaled:  # the scaler has skipped the step, and no call reports it
            self._forget()
        self.gradient_counts.dropped = False
        self._replaced.clear()
        super()._begin_gradients()

    @override
    def _evaluate(self, closure: Closure) -> float:
        self._restart()  # forgets the gradients that `synchronize` has averaged
        agreement, decides = self.agreement, isinstance(self._optimizer, torch.optim.LBFGS)
        agreement.evaluation += 1  # before the closure, which may synchronize
        loss = closure()
        agreement.loss = float(loss.detach() if isinstance(loss, Tensor) else loss) if decides else None
        return loss

    @override
    def prepare_for_scaler(self) -> None:
        if not self._scaled:
            self.synchronize()
            self._scaled = True

    @override
    def _take_gradients(self) -> None:
        """Average the gradients, which are there now, unless `synchronize` has; raises its NonFiniteGradient.

        With a GradScaler, which then skips the step, the gradients become None instead.
        """
        self.synchronize()
        errors, self._errors = self._errors, []
        scaled, self._scaled = self._scaled, False
        self._restart(Phase.STEPPED)
        if errors and not scaled:
            raise errors.pop()  # in no variable: its traceback has this frame, and they would keep each other
        for member in self._members if errors else ():
            member.parameter.grad = None  # optimizers pass over the parameter

    @override
    def refuse(self, error: Exception) -> NoReturn:
        self._restart()
        try:
            if self._overlap and self.models_compared and self.reducers:  # else the others compare models first
                self._average(StepIntent(refusal=error))
            self.comm.reject(error, "an optimizer step")
        finally:
            del error  # its traceback has this frame, and they would keep each other

    @override
    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the gradients now, for the step to come; once is enough.

        Where a rank has NaN or infinity the gradients hold NaN on all ranks, and the step raises the error.
        """
        if self.phase is Phase.AVERAGED:
            return
        self.reducers.lay_out(self.gradient_counts.order)
        self._replaced.clear()
        try:
            self._average(StepIntent(self._find_refusal(), emptied=self._is_emptied()))
        except NonFiniteGradient as error:
            self._errors = [error]
        except BaseException:
            self._restart()
            raise
        if self._errors:
            for member in self._members:
                if member.parameter.grad is not None:
                    member.parameter.grad.fill_(float("nan"))
        self._changes.drop_frozen_gradients()
        self.synchronizations += not self._errors
        self.phase = Phase.AVERAGED

    def _is_emptied(self) -> bool:
        """Return True if `zero_grad` has dropped the gradients of this step and no others came; call it once a step."""
        dropped, self.gradient_counts.dropped = self.gradient_counts.dropped, False
        return dropped and all(member.parameter.grad is None for member in self.reducers.members)

    @override
    def drop_gradients(self, set_to_none: bool) -> None:
        """Forget the gradients, which the optimizer clears, since it holds the model's own parameters."""
        if self.phase is Phase.SENT:
            self._restart()
            self.gradient_counts.dropped = True
            self._average(StepIntent(drops=True))
        self._forget()

    def _forget(self) -> None:
        self.gradient_counts.dropped |= self.gradient_counts.any_complete and self.phase is not Phase.AVERAGED
        self._scaled = False
        self._errors.clear()
        self._replaced.clear()
        self._restart()

    @override
    def _load_rounds(self, rounds: State) -> None:
        super()._load_rounds(rounds)
        self.gradient_counts.dropped = False

    @override
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        if not torch.is_grad_enabled():  # as in most hooks: the context takes ten functions in Python
            return self._copy_gradients(reducer)
        with torch.no_grad():
            return self._copy_gradients(reducer)

    def _copy_gradients(self, reducer: BucketReducer) -> bool:
        gradients: list[Tensor] = []
        dtype = reducer.bucket.dtype
        try:
            for member in reducer.bucket.members:
                gradient = member.parameter.grad
                if gradient is None or gradient.dtype is not dtype or gradient.layout is not torch.strided:
                    gradient = self._gradient(member)
                gradients.append(gradient)
        except ValueError as error:
            refusal = reword(error, f"{self.comm.here}: {error}")
            if self._overlap:
                raise refusal from None  # the queue keeps it
            self.comm.reject(refusal, "averaging gradients")
        if reducer.take_alone(gradients, behind=self._overlap):
            return False
        torch._foreach_copy_(reducer.vector_views, gradients)
        reducer.padding_is_zero = self._overlap  # else buckets take turns with one vector
        return True

    @override
    def _take(self, reducer: BucketReducer) -> None:
        if self._overlap:
            self._show_mean(reducer)
            return
        gradients = [parameter.grad for parameter in reducer.parameters if parameter.grad is not None]  # all are there
        torch._foreach_copy_(gradients, reducer.mean_views)

    def _show_mean(self, reducer: BucketReducer) -> None:
        """Let the gradients be views of the mean, which spares a copy; vectors must not be shared with others."""
        for parameter, mean in zip(reducer.parameters, reducer.fresh_mean_views(), strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != mean.stride():  # a layout of its own: keep it
                gradient.copy_(mean)
            else:
                self._replaced.append(gradient)
                parameter.grad = mean

    def _gradient(self, member: NamedParameter) -> Tensor:
        parameter = member.parameter
        if parameter.grad is None or parameter.grad.dtype != parameter.dtype:
            require_own_gradients(member.name, parameter, ', or use synchronize="updates"')
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of {member.name!r} is sparse, which cannot be averaged element by "
                'element; build its layer with sparse=False or use synchronize="updates"'
            )
        return parameter.grad
