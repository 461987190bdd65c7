"""The state machine of a synchronizing optimizer, without the values that it averages.

    gradients   COLLECTING -> (SENT) -> AVERAGED -> STEPPED      the optimizer steps with averaged gradients
    updates     COLLECTING -> (SENT) -> STEPPED                  the moves of one or several steps are averaged
    momenta     COLLECTING -> AVERAGED -> STEPPED                the moments of 1-bit Adam are averaged

SENT is entered with overlap only: buckets then start during backward. The first gradient after STEPPED leads back to
COLLECTING.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum, auto
from typing import ClassVar, TypeAlias

from collectives.annotations import override
from collectives.caller_warning import warn_caller
from collectives.errors import explains_itself
from collectives.quoting import one_line
from mpicomp.torch.replication import require_same_values
from mpicomp.torch.synchronizer.bucket_averaging import BucketAveraging, SynchronizerParts
from mpicomp.torch.synchronizer.gradient_hooks import SILENT_STEPS
from mpicomp.torch.synchronizer.inner_steps import InnerSteps
from mpicomp.torch.synchronizer.replaced_parameters import ReplacedParameters

COMPARE_EVERY = 1000
"""Synchronizations after which the ranks compare their whole models again; samples are compared in each step."""

Closure: TypeAlias = Callable[[], float]


class Phase(Enum):
    """Progress of a step."""

    COLLECTING = auto()
    """Gradients come, or none has come yet. They are this rank's own."""
    SENT = auto()
    """Buckets have started during backward, on this rank or possibly on another one."""
    AVERAGED = auto()
    """The means are there, for the step to come."""
    STEPPED = auto()
    """The optimizer has been given the gradients of the step."""


class Synchronizer(BucketAveraging):
    """Makes the steps of an optimizer, with averages of its buckets.

    Attributes
    ----------
    phase
        Progress of the current step.
    inner_steps
        Context manager for steps of the optimizer, if it is a wrapped one.
    """

    late_change: ClassVar[str]
    """Consequence and cure of gradients that are changed after they were sent, for the error message."""

    def __init__(self, parts: SynchronizerParts) -> None:
        super().__init__(parts)
        self.phase = Phase.COLLECTING
        self.inner_steps = InnerSteps()
        self._replacements = ReplacedParameters(parts.parameters.trained)
        self._compared_at = 0  # synchronizations, when the whole models were compared last
        self._scaled = False  # a GradScaler has searched the gradients of this step

    @property
    def can_refuse(self) -> bool:
        """Flag: a refusal of the step to come reaches the other ranks in that step."""
        return True

    @property
    def models_differ(self) -> bool:
        """Flag: the ranks' models differ now, because local steps were made since the last synchronization."""
        return False

    @property
    def awaits_averaging(self) -> bool:
        """Flag: gradients of this step have come, and a reader is to find their mean."""
        return False

    # A step -----------------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None) -> float | None:
        """Step, and synchronize if that is due. Returns the result of the optimizer's step."""
        self.agreement.evaluation = 0
        self.check_before_step()
        with self._reporting(), self._stepping():
            loss = self._step_optimizer(closure)
        self._compare_from_time_to_time()
        return loss

    def admit_inner_step(self, call: str) -> None:
        """Give averaged gradients to a step of the optimizer that its owner makes; refuse one with this rank's own."""
        if self.phase is Phase.AVERAGED:
            self._take_gradients()
            self._compare_from_time_to_time()
        elif self.gradient_counts.any_came:
            error = RuntimeError(
                f"{self.comm.here}: {call} outside of DistributedOptimizer.step(), with gradients of this rank alone: "
                'step the DistributedOptimizer, or average by synchronize() before, under "gradients", as for SAM'
            )
            if self.can_refuse:
                self.refuse(error)
            raise error

    def _compare_from_time_to_time(self) -> None:
        if self.synchronizations - self._compared_at >= COMPARE_EVERY:
            self.compare_next()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Refuse the step on all ranks if a closure, or the wrapped optimizer before the averages, raises an error."""
        if self.phase is Phase.STEPPED:
            self.phase = Phase.COLLECTING
        try:
            yield
        except Exception as error:
            if not explains_itself(error) and self.can_refuse and self.phase is Phase.COLLECTING:
                # another error, as the mark of ours would leave out lines of the caller's traceback
                with suppress(RuntimeError):
                    self._refuse_failed(RuntimeError(f"{self.comm.here}: {type(error).__name__}: {one_line(error)}"))
            raise

    def _refuse_failed(self, error: RuntimeError) -> None:
        """Refuse a step that has failed here, which the loop may repeat."""
        self.refuse(error)

    def compare_next(self) -> None:
        """Compare the models in the next step. On all ranks, newcomers included: it is a call of all."""
        self._compared_at, self.models_compared = self.synchronizations, False

    def check_before_step(self) -> None:
        """Find parameters that were added, unfrozen or frozen; refuse other changes; compare models if due."""
        if self.phase is Phase.AVERAGED:
            return  # the other ranks make this step without another call, in which a refusal could reach them
        try:
            self._changes.find()
            refuses, counts = self.can_refuse, self.gradient_counts
            problem = self._parameters.find_change() or self._replacements.find(counts) if refuses else ""
        except (TypeError, ValueError) as error:
            problem = str(error) if self.can_refuse else ""
        if problem:
            self.refuse(ValueError(f"{self.comm.here}: {problem}"))
        if not self.models_compared:
            self._compare_models()
            self.models_compared = True

    def _compare_models(self) -> None:
        """Raise CollectiveMismatch if the ranks' models differ; on all ranks."""
        values = {one.name: one.parameter for one in self._parameters.trained}
        common = self.agreement.common
        aside = {one.name: common[one.parameter] for one in self._members if one.parameter in common}
        require_same_values(values | aside, self.comm)

    def _step_optimizer(self, closure: Closure | None) -> float | None:
        if closure is None:
            self._take_gradients()
            with self._without_moved(), self.inner_steps:
                return self._optimizer.step()

        def evaluate() -> float:
            value = self._evaluate(closure)
            self._take_gradients()
            return value

        with self.inner_steps:
            return self._optimizer.step(evaluate)

    def _stepping(self) -> AbstractContextManager[None]:
        """Prepare the model for a step, count the step in the end, and restore the model after an error."""
        return nullcontext()

    def _evaluate(self, closure: Closure) -> float:
        """Let a closure make gradients."""
        return closure()

    def _without_moved(self) -> AbstractContextManager[None]:
        """Leave out parameters that have moved during backward from the optimizer's step."""
        return nullcontext()

    @abstractmethod
    def _take_gradients(self) -> None:
        """Prepare the gradients, which are there now, for the optimizer."""

    @abstractmethod
    def synchronize(self) -> None:
        """Average now, if there is something to average."""

    # Events between steps ---------------------------------------------------------------------------------------------

    @property
    def _takes_early(self) -> bool:
        """Flag: a gradient counts as sent once backward has brought it, though its bucket may wait for the step."""
        return self._overlap and not self.gradient_counts.overtaken and self.can_refuse

    @property
    def _starts_early(self) -> bool:
        """Flag: buckets start during backward. The last one, which may be the only one, waits for the step."""
        return self._takes_early and self.models_compared and len(self.reducers) > 1

    @override
    def gradient_came(self, position: int) -> None:
        """Start the buckets that this gradient completes; called by hooks during backward."""
        counts = self.gradient_counts
        if self._scaled or not counts.any_came:
            self._begin_gradients()
        averaged, noted = self.phase is Phase.AVERAGED, self._early.notes and not counts.overtaken
        early = noted and self._early.starts and self.models_compared
        complete = counts.complete(position, averaged or early)
        if averaged:
            raise counts.late(position)
        if complete and early:
            self.phase = Phase.SENT
            # as often as hooks are called, a call counts: the others are for complete buckets
            index = self.reducers.bucket_of[position]
            if self._early.queue.count(index, made=self.reducers.members[position].parameter):
                self._early.start(index)
            elif not self._early.notes_rest:
                self._early.note_rest_later()
            if self.comm.calls.driver is None:
                self.comm.calls.advance()
            return
        if complete and noted:
            self._early.sent.note([self.reducers.members[position]])
        if self.phase is Phase.STEPPED:
            self.phase = Phase.COLLECTING

    def _begin_gradients(self) -> None:
        """Prepare for the gradients of a step, of which the first one comes."""
        self._early.notes, self._early.starts = self._takes_early, self._starts_early

    def check_before_synchronizing(self) -> None:
        """Check as before a step, and take the gradients that are not sent as the loop has left them."""
        self.check_before_step()
        self._early.sent.release_unsent()

    def _restart(self, phase: Phase = Phase.COLLECTING) -> None:
        if phase is Phase.STEPPED and self.gradient_counts.count_silent_step():
            warn_caller(
                f"{self.comm.here}: no parameter had a gradient in the last {SILENT_STEPS} steps, which counts as "
                "zeros: was the model replaced after the optimizer was made? Or iterate over optimizer.join(batches)"
            )
        self.phase = phase
        self.gradient_counts.restart()
        self._early.sent.clear()
        self._early.notes_rest = False

    def _find_refusal(self) -> Exception | None:
        """Return the error if gradients were changed after they had been sent."""
        name = self._early.sent.find_change()
        if not name:
            return None
        return RuntimeError(
            f"{self.comm.here}: the gradient of {name!r} was changed or dropped between backward() and step(), after "
            f"{self.late_change}"
        )

    @abstractmethod
    def prepare_for_scaler(self) -> None:
        """Agree on infinities among the gradients, so that GradScalers find some on all ranks or on none."""

    def show_gradients(self) -> None:
        """Give float32 copies of 16-bit parameters the gradients that have come, for a caller who reads them."""

    @abstractmethod
    def drop_gradients(self, set_to_none: bool) -> None:
        """Forget the gradients of this step; collective if buckets have been sent."""

    def common_model(self) -> AbstractContextManager[None]:
        """Let the parameters hold the common model for a while."""
        return nullcontext()
