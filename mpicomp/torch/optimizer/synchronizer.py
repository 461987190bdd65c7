"""The state machine of a synchronizing optimizer, without the values that it averages.

    gradients   COLLECTING -> (SENT) -> AVERAGED -> STEPPED      the optimizer steps with averaged gradients
    updates     COLLECTING -> (SENT) -> STEPPED                  the moves of one or several steps are averaged
    momenta     COLLECTING -> AVERAGED -> STEPPED                the moments of 1-bit Adam are averaged

SENT is entered with overlap only: buckets then start during backward. The first gradient after STEPPED leads back to
COLLECTING.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from collectives import Communicator
from collectives.annotations import override
from collectives.caller_warning import warn_caller
from collectives.errors import explains_itself, reword
from collectives.execution.handle import keep_uncompiled
from collectives.quoting import one_line, shown
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import Algorithm
from mpicomp.torch.bucket_queue import BucketQueue
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.devices import current_stream
from mpicomp.torch.optimizer.adam_moments import ParameterGroup
from mpicomp.torch.optimizer.agreed_buckets import collect_agreed, start_agreed
from mpicomp.torch.optimizer.gradient_hooks import GradientCounts, SentGradients, install_hooks
from mpicomp.torch.optimizer.inner_steps import InnerSteps
from mpicomp.torch.optimizer.parameter_changes import ParameterChanges
from mpicomp.torch.optimizer.replaced_parameters import ReplacedParameters
from mpicomp.torch.optimizer.step_agreement import StepAgreement, StepIntent
from mpicomp.torch.parameters import Parameters
from mpicomp.torch.replication import require_same_values
from mpicomp.torch.state.rank_state import StateOwner, require_aggregators
from mpicomp.torch.state.schema import GRADIENT_ROUNDS, WRAPPER, State

SILENT_STEPS = 10
"""Steps without any gradient, on end, after which a rank warns."""
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


@dataclass(frozen=True)
class SynchronizerParts:
    """The parts of every synchronizer."""

    optimizer: torch.optim.Optimizer
    reducers: BucketReducers
    comm: Communicator
    agreement: StepAgreement
    parameters: Parameters
    changes: ParameterChanges
    overlap: bool = False  # buckets start during backward
    passes: int = 1  # gradients that backward adds up for each parameter in a step


class Synchronizer(StateOwner):
    """Averages the buckets of an optimizer, and steps with them.

    Attributes
    ----------
    phase
        Progress of the current step.
    synchronizations
        Number of averages taken.
    inner_steps
        Context manager for steps of the optimizer, if it is a wrapped one.
    silent_steps
        Steps on end in which this rank had no gradient at all.
    models_compared
        Flag: the ranks have compared their whole models. Buckets start during backward only from then on.
    """

    mode: ClassVar[str]
    """Values that are averaged: "gradients", "updates" or "momenta"."""
    state_schema = WRAPPER
    loads = "restoring an optimizer"
    late_change: ClassVar[str]
    """Consequence and cure of gradients that are changed after they were sent, for the error message."""
    takes_for_good: ClassVar[bool] = False
    """Flag: a mean that was taken stays in the model if a later bucket fails."""

    def __init__(self, parts: SynchronizerParts) -> None:
        self.reducers, self.comm, self.agreement = parts.reducers, parts.comm, parts.agreement
        self.phase = Phase.COLLECTING
        self.synchronizations = 0
        self.models_compared = False
        self.gradient_counts = GradientCounts([member.name for member in parts.reducers.members], parts.passes)
        self._optimizer, self._parameters, self._overlap = parts.optimizer, parts.parameters, parts.overlap
        self._changes, self._replacements = parts.changes, ReplacedParameters(parts.parameters.trained)
        self.agreement.changes = parts.changes
        self.silent_steps = 0
        self.inner_steps = InnerSteps()
        self._compared_at = 0  # synchronizations, when the whole models were compared last
        self._queue = BucketQueue(parts.reducers, parts.comm, self._fill)
        self._sent = SentGradients()
        self._notes = self._pushes = False  # gradients of this step are noted, and complete buckets start
        self._notes_rest = False  # autograd calls `_note_rest` at the end of this backward
        self._scaled = False  # a GradScaler has searched the gradients of this step

    @property
    def active(self) -> Sequence[BucketReducer]:
        """The reducers of the last step, one per bucket."""
        return self.reducers

    @property
    def every_reducer(self) -> Sequence[BucketReducer]:
        """The reducers of all steps."""
        return self.reducers

    @property
    def models_differ(self) -> bool:
        """Flag: the ranks' models differ now, because local steps were made since the last synchronization."""
        return False

    @property
    def can_refuse(self) -> bool:
        """Flag: a refusal of the step to come reaches the other ranks in that step."""
        return True

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
                    self.refuse(RuntimeError(f"{self.comm.here}: {type(error).__name__}: {one_line(error)}"))
            raise

    def compare_next(self) -> None:
        """Compare the models in the next step. On all ranks, newcomers included: it is a call of all."""
        self._compared_at, self.models_compared = self.synchronizations, False

    def check_before_step(self) -> None:
        """Find parameters that were added, unfrozen or frozen; refuse other changes; compare models if due."""
        if self.phase is Phase.AVERAGED:
            return  # the other ranks make this step without another call, in which a refusal could reach them
        try:
            self._changes.find()
            problem = self._parameters.find_change() or self._find_replaced() if self.can_refuse else ""
        except (TypeError, ValueError) as error:
            problem = str(error) if self.can_refuse else ""
        if problem:
            self.refuse(ValueError(f"{self.comm.here}: {problem}"))
        if not self.models_compared:
            self._compare_models()
            self.models_compared = True

    def _find_replaced(self) -> str:
        """Return, with its cure, a parameter that its module has replaced and that has no gradient; or nothing."""
        replaced, counts = self._replacements.found, self.gradient_counts
        for position, member in enumerate(self._parameters.trained if replaced or not counts.any_came else ()):
            parameter = member.parameter
            if parameter in replaced and parameter.requires_grad and counts.lacks(position):
                return (
                    f"parameter {member.name!r} was replaced in its module after the optimizer was made: make both "
                    "optimizers again, or freeze the old one, which this one holds, by requires_grad_(False)"
                )
            # has the hooks called again that PyTorch leaves behind where a module swaps its tensors
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        return ""

    def _compare_models(self) -> None:
        """Raise CollectiveMismatch if the ranks' models differ; on all ranks."""
        require_same_values(self._common_values(), self.comm)

    def _common_values(self) -> dict[str, Tensor]:
        """Return the values that are equal on all ranks, by the parameters' names; no copies."""
        return {one.name: one.parameter for one in self._parameters.trained}

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

    # Parameters that join -------------------------------------------------------------------------------------------

    def add_group(self, group: ParameterGroup, add: Callable[[ParameterGroup], None]) -> None:
        """Add a parameter group by the optimizer's method `add`; its parameters join at the next step."""
        try:
            self._changes.add_group(group, add)
        except (ValueError, TypeError) as error:
            refusal = reword(error, f"{self.comm.here}: {error}")
            if not self._changes.fixed:
                self.refuse(refusal)
            raise refusal from None

    def _watch_gradients(self, first: int) -> None:
        """Have hooks report the gradients of the synchronized parameters from position `first` on."""
        install_hooks(self, [member.parameter for member in self._parameters.trained[first:]], first)

    def _admit(self) -> None:
        """Give buckets to the parameters that join, on which all ranks have agreed in this step; collective.

        Raises
        ------
        CollectiveMismatch
            The ranks' values of them differ. They go on waiting then.
        """
        members, algorithms, common = self._changes.joining, self._changes.algorithms, self.agreement.common
        if not members:
            return
        require_same_values({one.name: common.get(one.parameter, one.parameter) for one in members}, self.comm)
        try:
            self._open_buckets(members, algorithms)
        except Exception as error:  # noqa: BLE001 - of this rank alone, as where memory is short
            self.comm.reject(error, "adding parameters")
        self._join(members)

    def _open_buckets(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        self.reducers.add(members, algorithms)

    def _join(self, members: Sequence[NamedParameter]) -> None:
        """Synchronize these of the parameters that join, which have buckets, from now on."""
        if not members:
            return
        first = len(self.gradient_counts)
        self._changes.join(members)
        self.gradient_counts.add([member.name for member in members])
        self.agreement.members = self.reducers.members
        self._watch_gradients(first)

    # Events between steps ---------------------------------------------------------------------------------------------

    @property
    def _takes_early(self) -> bool:
        """Flag: a gradient counts as sent once backward has brought it, though its bucket may wait for the step."""
        return self._overlap and not self.gradient_counts.overtaken and self.can_refuse

    @property
    def _starts_early(self) -> bool:
        """Flag: buckets start during backward. The last one, which may be the only one, waits for the step."""
        return self._takes_early and self.models_compared and len(self.reducers) > 1

    def gradient_came(self, position: int) -> None:
        """Start the buckets that this gradient completes; called by hooks during backward."""
        counts = self.gradient_counts
        if self._scaled or not counts.any_came:
            self._begin_gradients()
        averaged, noted = self.phase is Phase.AVERAGED, self._notes and not counts.overtaken
        early = noted and self._pushes and self.models_compared
        complete = counts.complete(position, averaged or early)
        if averaged:
            raise counts.late(position)
        if complete and early:
            self.phase = Phase.SENT
            index = self.reducers.bucket_of[position]
            stream = current_stream(self.reducers.members[position].parameter)
            if self._queue.count(index, stream=stream):
                self._start_complete(index)
            elif not self._notes_rest:
                queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
                with suppress(RuntimeError):  # outside of backward
                    queue(self._note_rest)
                    self._notes_rest = True
            if self.comm.calls.driver is None:
                self._queue.poll()
            return
        if complete and noted:
            self._sent.note([self.reducers.members[position]])
        if self.phase is Phase.STEPPED:
            self.phase = Phase.COLLECTING

    def _begin_gradients(self) -> None:
        """Prepare for the gradients of a step, of which the first one comes."""
        self._notes, self._pushes = self._takes_early, self._starts_early

    def check_before_synchronizing(self) -> None:
        """Check as before a step, and take the gradients that are not sent as the loop has left them."""
        self.check_before_step()
        self._sent.release_unsent()

    def _restart(self, phase: Phase = Phase.COLLECTING) -> None:
        if phase is Phase.STEPPED:
            self._count_silent_step()
        self.phase = phase
        self.gradient_counts.restart()
        self._sent.clear()
        self._notes_rest = False

    def _count_silent_step(self) -> None:
        """Warn once this rank has made many steps on end without any gradient, after others with some."""
        counts = self.gradient_counts
        self.silent_steps = 0 if counts.any_came or not counts.order else self.silent_steps + 1
        if self.silent_steps == SILENT_STEPS:
            warn_caller(
                f"{self.comm.here}: no parameter had a gradient in the last {SILENT_STEPS} steps, which counts as "
                "zeros: was the model replaced after the optimizer was made? Or iterate over optimizer.join(batches)"
            )

    def _find_refusal(self) -> Exception | None:
        """Return the error if gradients were changed after they had been sent."""
        name = self._sent.find_change()
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

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Raise `error` here, and CollectiveMismatch on the ranks that make the step; no rank makes it."""

    def common_model(self) -> AbstractContextManager[None]:
        """Let the parameters hold the common model for a while."""
        return nullcontext()

    # States ---------------------------------------------------------------------------------------------------------

    @property
    @override
    def aggregators(self) -> tuple[Aggregator, ...]:
        return tuple(reducer.aggregator for reducer in self.active)

    @override
    def own_entries(self) -> State:
        groups = self._optimizer.param_groups
        shapes = [[*parameter.shape] for group in groups for parameter in group["params"]]
        return {"mode": self.mode, "rounds": self._save_rounds(), "buckets": self.reducers.names, "shapes": shapes}

    @override
    def check_own(self, own: State) -> None:
        if own["mode"] != self.mode:
            raise ValueError(
                f"the state is for synchronize={shown(own['mode'])}, but this optimizer has {self.mode!r}; build it "
                "with the same options"
            )
        changes = self._changes
        changes.find()
        with self.reducers.trial(own["buckets"], changes.joining, changes.algorithms) as reducers:
            require_aggregators(own, [reducer.aggregator for reducer in reducers])
        self._check_rounds(own["rounds"])

    @override
    def restored_point(self, own: State) -> str:
        return f"after {own['rounds']['rounds']} synchronizations{self._changes.describe_joining(own['buckets'])}"

    @override
    def load_own(self, own: State) -> None:
        self._join(self.reducers.restore(own["buckets"], self._changes.joining, self._changes.algorithms))
        self._load_rounds(own["rounds"])
        self.models_compared = False

    @override
    def wrapped_state(self) -> State:
        return self._optimizer.state_dict()

    @override
    def load_wrapped(self, state: State) -> None:
        before = self.wrapped_state()
        try:
            # a copy, since torch takes over the tensors themselves, which redistributed states share
            self._load_optimizer(copy.deepcopy(state))
        except Exception as error:  # torch checks little, and other optimizers have rules of their own
            self._load_optimizer(before)
            raise ValueError(
                f"{type(self._optimizer).__name__} cannot load its part of the state ({type(error).__name__}: "
                f"{one_line(error)}); build it with the same options, or load an earlier state"
            ) from error

    def _load_optimizer(self, state: State) -> None:
        self._optimizer.load_state_dict(state)

    def _save_rounds(self) -> State:
        return {"rounds": self.synchronizations}

    def _check_rounds(self, rounds: State) -> None:
        GRADIENT_ROUNDS.check(rounds)

    def _load_rounds(self, rounds: State) -> None:
        self.synchronizations = rounds["rounds"]

    # Buckets ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        """Write a reducer's vector: see `mpicomp.torch.bucket_queue.Fill`."""

    @abstractmethod
    def _take(self, reducer: BucketReducer) -> None:
        """Take the mean of a reducer."""

    def _start_complete(self, index: int) -> None:
        """Start the buckets that are due once this one is complete, and watch its gradients and those that are sent."""
        queue = self._queue
        self._sent.note_new(self.reducers[index].bucket.members)
        before = queue.n_started
        queue.start_complete()
        for reducer in self.reducers[before : queue.n_started]:
            self._sent.add(reducer.bucket.members, reducer.mean)

    @keep_uncompiled
    def _note_rest(self) -> None:
        """Note the gradients of incomplete buckets at the end of a backward: the others are noted together."""
        self._notes_rest = False
        with self.gradient_counts.lock:
            is_complete, incomplete = self.gradient_counts.is_complete, {*self._queue.incomplete}
            pairs = self.reducers.bucket_of.items() if incomplete else ()
            members = self.reducers.members
            self._sent.note_new([members[at] for at, bucket in pairs if bucket in incomplete and is_complete(at)])

    def _average(self, intent: StepIntent, reducers: Iterable[BucketReducer] | None = None) -> None:
        """Average buckets, None: all, and take their means, on all ranks or on none. With overlap they must be all.

        Raises
        ------
        Exception
            This rank's refusal, or the error by which a bucket could not be filled.
        NonFiniteGradient
            Error of the first bucket with NaN or infinity.
        CollectiveMismatch
            Another rank refuses the step, or the ranks differ: see `StepAgreement.conclude`.
        """
        undoable: list[BucketReducer] = []
        try:
            if self._overlap:
                self._collect(intent, undoable)
            else:
                self._average_in_turn(intent, self.active if reducers is None else reducers, undoable)
        except BaseException:
            for reducer in undoable:
                reducer.undo()
            raise
        finally:
            intent.refusal = None  # its traceback has frames that have the intent, and they would keep each other

    def _average_in_turn(
        self, intent: StepIntent, reducers: Iterable[BucketReducer], undoable: list[BucketReducer]
    ) -> None:
        """Average one bucket after the other; the first one carries the agreement, so that the others are not sent."""
        is_first = True
        for reducer in reducers:  # those of parameters that join are added behind the first
            if is_first:
                self.agreement.attach(reducer.aggregator, intent)
            if intent.is_silent:
                reducer.clear()
            sends = intent.is_silent or self._fill(reducer, False)
            if sends:
                reducer.aggregate()
                undoable.append(reducer)
            if is_first:
                self.agreement.conclude(intent)
                self._admit()
                is_first = False
            if sends:
                self._take(reducer)
                if self.takes_for_good:
                    undoable.clear()

    def _collect(self, intent: StepIntent, undoable: list[BucketReducer]) -> None:
        """Start the buckets that have not started, the last of which carries the agreement, and wait for all."""

        def take(reducer: BucketReducer) -> None:
            if not self.takes_for_good:
                undoable.append(reducer)
            self._take(reducer)

        start_agreed(self._queue, self.agreement, intent)
        self._sent.clear()
        if collect_agreed(self._queue, self.agreement, intent, take):
            self._average_joining(undoable)

    def _average_joining(self, undoable: list[BucketReducer]) -> None:
        """Average the buckets of the parameters that join in this step, which the queue does not have yet."""
        before = len(self.reducers)
        self._admit()
        for reducer in self.reducers[before:]:
            try:
                sends = self._fill(reducer, False)
            except Exception as error:  # noqa: BLE001 - the other ranks average this bucket
                self.comm.reject(error, "averaging")
            if not sends:
                reducer.wait()  # raises the error of values that were taken alone, and are their own mean
                continue
            reducer.aggregate()
            undoable.append(reducer)
            self._take(reducer)
            if self.takes_for_good:
                undoable.clear()
