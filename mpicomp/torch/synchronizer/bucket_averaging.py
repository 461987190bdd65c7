"""Buckets of an optimizer's parameters: their averages, their states, and the parameters that join."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

import torch

from collectives import Communicator
from collectives.annotations import override
from collectives.errors import reword
from collectives.quoting import shown
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets.bucket_queue import BucketQueue
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.buckets.bucket_reducers import BucketReducers
from mpicomp.torch.parameters import NamedParameter, ParameterGroup, Parameters
from mpicomp.torch.replication import require_same_values
from mpicomp.torch.state.rank_state import StateOwner, require_aggregators
from mpicomp.torch.state.schema import GRADIENT_ROUNDS, WRAPPER, State, cannot_load
from mpicomp.torch.synchronizer.agreed_buckets import collect_agreed, start_agreed
from mpicomp.torch.synchronizer.early_buckets import EarlyBuckets
from mpicomp.torch.synchronizer.gradient_hooks import GradientCounts, install_hooks
from mpicomp.torch.synchronizer.parameter_changes import ParameterChanges
from mpicomp.torch.synchronizer.step_agreement import StepAgreement, StepIntent


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


class BucketAveraging(StateOwner):
    """Averages the buckets of an optimizer, on all ranks or on none.

    Attributes
    ----------
    active
        The reducers of the last step, one per bucket.
    synchronizations
        Number of averages taken.
    models_compared
        Flag: the ranks have compared their whole models. Buckets start during backward only from then on.
    """

    mode: ClassVar[str]
    """Values that are averaged: "gradients", "updates" or "momenta"."""
    state_schema = WRAPPER
    loads = "restoring an optimizer"
    takes_for_good: ClassVar[bool] = False
    """Flag: a mean that was taken stays in the model if a later bucket fails."""

    def __init__(self, parts: SynchronizerParts) -> None:
        self.reducers, self.comm, self.agreement = parts.reducers, parts.comm, parts.agreement
        self.active: list[BucketReducer] = parts.reducers  # the same list: who changes it makes one of its own
        self._optimizer, self._parameters, self._overlap = parts.optimizer, parts.parameters, parts.overlap
        self._changes = self.agreement.changes = parts.changes
        self.synchronizations = 0
        self.models_compared = False
        self.gradient_counts = GradientCounts([member.name for member in parts.reducers.members], parts.passes)
        queue = BucketQueue(parts.reducers, parts.comm, self._fill)
        self._early = EarlyBuckets(queue, parts.reducers, self.gradient_counts)

    @property
    def every_reducer(self) -> Sequence[BucketReducer]:
        """The reducers of all steps."""
        return self.reducers

    @property
    def _members(self) -> tuple[NamedParameter, ...]:
        """The parameters with a bucket, and those that join."""
        return *self.reducers.members, *self._changes.joining

    @abstractmethod
    def gradient_came(self, position: int) -> None:
        """Take note of a gradient; called by hooks during backward."""

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Raise `error` here, and CollectiveMismatch on the ranks that make the step; no rank makes it."""

    @abstractmethod
    def _fill(self, reducer: BucketReducer, early: bool) -> bool:
        """Write a reducer's vector: see `mpicomp.torch.buckets.bucket_queue.Fill`."""

    @abstractmethod
    def _take(self, reducer: BucketReducer) -> None:
        """Take the mean of a reducer."""

    # Averages ---------------------------------------------------------------------------------------------------------

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

        start_agreed(self._early.queue, self.agreement, intent)
        self._early.sent.clear()
        if collect_agreed(self._early.queue, self.agreement, intent, take):
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

    # Parameters that join ---------------------------------------------------------------------------------------------

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

    # States -----------------------------------------------------------------------------------------------------------

    @property
    @override
    def aggregators(self) -> tuple[Aggregator, ...]:
        return tuple(reducer.aggregator for reducer in self.active)

    @override
    def own_entries(self) -> State:
        rounds, buckets = self._save_rounds(), self.reducers.names
        return {"mode": self.mode, "rounds": rounds, "buckets": buckets, **self._describe_wrapped()}

    def _describe_wrapped(self) -> State:
        """Return class and parameters of the wrapped optimizer, whose state goes by their order alone."""
        names, held = self._parameters.names_in_order, self._parameters.held
        shapes = [[*parameter.shape] for parameter in held]
        return {"optimizer": type(self._optimizer).__name__, "parameters": names, "shapes": shapes}

    def _check_wrapped(self, own: State) -> None:
        here = self._describe_wrapped()
        if own["optimizer"] != here["optimizer"]:
            raise ValueError(
                f"the state is of an optimizer {shown(own['optimizer'])}, but this one wraps {here['optimizer']}; "
                "build it with the same optimizer"
            )
        pairs = [zip_longest(one["parameters"], one["shapes"]) for one in (own, here)]
        for i, (saved, now) in enumerate(zip_longest(*pairs)):
            if saved != now:
                was, now_is = (f"{shown(one[0])} of shape {shown(one[1])}" if one else "none" for one in (saved, now))
                raise ValueError(
                    f"parameter {i} of the wrapped optimizer was {was} in the state, and is {now_is} here, so that its "
                    "state would go to other parameters; make it of the same parameters in the same order"
                )

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
        self._check_wrapped(own)

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
            raise cannot_load(type(self._optimizer).__name__, error) from error

    def _load_optimizer(self, state: State) -> None:
        self._optimizer.load_state_dict(state)

    def _save_rounds(self) -> State:
        return {"rounds": self.synchronizations}

    def _check_rounds(self, rounds: State) -> None:
        GRADIENT_ROUNDS.check(rounds)

    def _load_rounds(self, rounds: State) -> None:
        self.synchronizations = rounds["rounds"]
