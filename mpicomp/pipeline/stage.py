"""One stage of a pipeline: a slice of a model, which exchanges activations and gradients with its neighbours.

A step cuts the batch into micro-batches and follows a schedule. Messages are in flight while others compute: each
receive is begun up to two actions ahead, and no send is waited for before the step ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from operator import index
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from collectives import Communicator
from collectives.annotations import override
from collectives.quoting import one_line, shown
from mpicomp.codecs.options import whole
from mpicomp.pipeline.activations import Compression, Direct
from mpicomp.pipeline.agreement import (
    MessagesDiffer,
    PipelineError,
    agree_on_batch,
    agree_on_end,
    agree_on_options,
    failure_text,
    raise_faults,
    share_with_replicas,
)
from mpicomp.pipeline.cut import CutEnd, Downstream, Upstream, call_all, check_compressions
from mpicomp.pipeline.cut_holder import CutHolder
from mpicomp.pipeline.message_layout import Tensors
from mpicomp.pipeline.messages import REFUSABLE
from mpicomp.pipeline.schedule import Action, Schedule
from mpicomp.pipeline.schedule import schedule as schedule_of
from mpicomp.pipeline.simulate import all_stages, prove
from mpicomp.pipeline.slice_step import Loss, PartOfBatch, SliceStep, evaluating, loss_of, pass_forward
from mpicomp.pipeline.store_rows import Ids
from mpicomp.pipeline.store_states import State
from mpicomp.pipeline.tensors import with_tensors
from mpicomp.pipeline.tied import TiedParameters


class PipelineStage(CutHolder):
    """A rank's slice of a model that is spread over the ranks of a communicator, the first layers on rank 0.

    Parameters
    ----------
    module : nn.Module
        Takes the output of the stage before: a tensor, or tensors in tuples, lists and dictionaries. The examples of a
        micro-batch lie along the first dimension of each, and an example always has the same shape.
    comm : Communicator
        Of the stages, in their order; see `Communicator.grid` for several pipelines.
    micro_batches : int
        Into which a batch is cut, as evenly as can be; a batch of fewer examples is cut into so many.
    loss : callable, on the last stage
        ``loss(output, targets)`` of a micro-batch: a mean over its examples.
    tied : dict of str to Parameter, optional
        Parameters that stages share, such as an embedding of the first one that is the last one's output layer, by a
        name that these stages have in common. They begin with the values of the first of the stages, and a step adds
        the sum of all these stages' gradients. Give them the same optimizer and options on all these stages. With
        `everyone`, call `sum_tied_gradients` in each step.
    schedule : "1f1b", "gpipe" or a function
        See `mpicomp.pipeline.schedule`. A function is proved by `mpicomp.pipeline.simulate.prove`.
    forward, backward : Direct or Deltas
        How activations and their gradients travel; the same on all stages. `Deltas` only forward.
    seed : int
        Of stochastic rounding; the same on all stages. Several pipelines draw independently under one seed.
    everyone : Communicator, optional
        Of the stages of all pipelines whose gradients are averaged: a step that fails in one of them then fails in all,
        with a PipelineError. Nobody may use it during a step.

    Attributes
    ----------
    everyone : Communicator or None
        The parameter.
    most_alive : int
        Most micro-batches whose activations the stage has kept at one time.
    pipeline : int
        Rank of the pipeline's first stage in the job, by which pipelines side by side differ.
    steps : int
        Number of steps so far.

    Raises
    ------
    PipelineError
        An argument is wrong on some stage, or differs from that of another; on every stage.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.codecs import RowQuantizer
    >>> from mpicomp.pipeline import Deltas, Direct, PipelineStage
    >>> examples = torch.linspace(-1, 1, 8)[:, None] * torch.ones(4)
    >>> def train(comm):
    ...     module = torch.nn.Linear(4, 4)  # this rank's layers
    ...     stage = PipelineStage(
    ...         module, comm, micro_batches=2, loss=torch.nn.functional.mse_loss,
    ...         forward=Deltas(RowQuantizer(bits=3), examples=8), backward=Direct(RowQuantizer(bits=6)),
    ...     )
    ...     optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ...     inputs, targets = (examples if stage.is_first else None), (-examples if stage.is_last else None)
    ...     before = stage.evaluate(inputs, targets)
    ...     for epoch in range(3):
    ...         optimizer.zero_grad()
    ...         loss = stage.step(inputs, targets, ids=np.arange(8))
    ...         optimizer.step()
    ...     output = stage.predict(inputs)  # None except on the last stage
    ...     forward_bytes, backward_bytes = stage.bytes_sent
    ...     alike = stage.stores_alike()
    ...     state = {"module": module.state_dict(), "stage": stage.state_dict()}  # for torch.save, one file per rank
    ...     stage.load_state_dict(state["stage"])
    ...     return loss < before, alike, stage.compare_stores(), stage.steps
    >>> mpicomp.run_local(2, train)
    [(True, True, 0, 3), (True, True, 0, 3)]
    """

    _rank_name: ClassVar[str] = "stage"

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        micro_batches: int,
        *,
        loss: Loss | None = None,
        tied: Mapping[str, nn.Parameter] | None = None,
        schedule: str | Schedule = "1f1b",
        forward: Compression | None = None,
        backward: Compression | None = None,
        seed: int = 0,
        everyone: Communicator | None = None,
    ) -> None:
        self.module, self.comm, self._loss, self.everyone = module, comm, loss, everyone
        self.stage, self.stages, self.micro_batches = comm.rank, comm.size, micro_batches
        self.most_alive = self.steps = 0
        self._before: Downstream | None = None
        self._after: Upstream | None = None
        compressions = forward or Direct(), backward or Direct()
        fault: str | None = None
        try:
            self._check_parts(tied)
            check_compressions(compressions)
            self._schedule = schedule_of(schedule)
            if whole(micro_batches):  # first: the text of the plan has numbers, and those of NumPy have another text
                self.micro_batches = micro_batches = int(micro_batches)
            self._planned = micro_batches, self._plan(micro_batches)
            if not isinstance(schedule, str):  # the address in a function's repr differs between processes
                schedule = f"schedule {zlib.crc32(repr(self._planned).encode()):08x}"
            self.micro_batches, seed = index(micro_batches), index(seed)
        except Exception as error:  # noqa: BLE001 - a schedule is a function of the user's
            fault = one_line(error)
        options = f"{micro_batches} micro-batches, {schedule}, forward {forward}, backward {backward}, seed {seed}"
        options += "" if everyone is None or fault else f", one of {everyone.size} stages of all replicas"
        # The first stage's place in the job is another one in each of several pipelines.
        self.pipeline = agree_on_options(comm, fault, options, "the pipeline cannot be made", self._rank_name)[0]
        if not self.is_first:
            self._before = Downstream(comm, self.stage - 1, self.stage - 1, compressions, seed, self.pipeline)
        if not self.is_last:
            self._after = Upstream(comm, self.stage + 1, self.stage, compressions, seed, self.pipeline)
        self._tied = TiedParameters(comm, tied or {}, deferred=everyone is not None)
        comm.start_progress_thread()  # where it is not supported, messages go on while the stage waits

    def _check_parts(self, tied: object) -> None:
        """Raise TypeError for parts that make no stage."""
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"the module is a {type(self.module).__name__}: pass the stage's nn.Module")
        if self.is_last and not callable(self._loss):
            raise TypeError("the last stage has no loss: pass loss=, which is called with outputs and targets")
        if not isinstance(self.everyone, Communicator | None) or not isinstance(tied, Mapping | None):
            raise TypeError(
                f"everyone is {shown(self.everyone)} and tied {shown(tied)}: pass a Communicator and a dict"
            )

    @property
    def is_first(self) -> bool:
        """True if the stage takes the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if the stage takes the targets and has the loss."""
        return self.stage == self.stages - 1

    @override
    def _held_cuts(self) -> list[CutEnd]:
        return [cut for cut in (self._after, self._before) if cut is not None]

    @property
    def _sides(self) -> dict[str, CutEnd]:
        """The cuts by the side on which they lie."""
        cuts: dict[str, CutEnd | None] = {"before": self._before, "after": self._after}
        return {side: cut for side, cut in cuts.items() if cut is not None}

    # Steps -----------------------------------------------------------------------------------------------------------

    def step(self, inputs: Tensors = None, targets: Tensors = None, ids: ArrayLike | None = None) -> float:
        """Add the gradients of a batch's mean loss to ``.grad`` of the stage's parameters; collective.

        Parameters
        ----------
        inputs : tensor[examples, ...], on the first stage
            Or several, in a tuple or dictionary.
        targets : tensor[examples, ...], on the last stage
            Or several, as above.
        ids : integers[examples]
            Which examples these are; the same on all stages. `Deltas` needs them.

        Returns
        -------
        float
            The mean loss, on every stage.

        Raises
        ------
        PipelineError
            Something failed on a stage, which the error names; on every stage. Gradients, buffers of the module, such
            as running statistics, and messages that are kept for examples are as before the step, and it can be
            repeated.
        CollectiveTimeout, PeerFailure
            A stage does not answer. The communicator can be used no longer.
        """
        with share_with_replicas(self.everyone):
            listed = self._agree_on_ids(inputs, targets, ids)
            micro_batches = min(self.micro_batches, listed.size)
            actions = self._actions(micro_batches)
        parts = np.array_split(listed, micro_batches)
        run = SliceStep(self.module, self._before, self._after, parts, loss=self._loss, inputs=inputs, targets=targets)
        with self._transaction(self._held_cuts(), (self.module, self._loss)):
            differing: PipelineError | None = None
            try:
                self._tied.begin()
            except PipelineError as error:  # on all stages of this pipeline; other pipelines begin the step
                differing = error
            for number, action in enumerate(actions if differing is None else ()):
                run.take(action, actions[number + 1 : number + 3])
            run.finish()
            self.most_alive = max(self.most_alive, run.most_alive)
            with share_with_replicas(self.everyone):
                if differing is not None:
                    raise differing
                loss = agree_on_end(self.comm, run.loss, run.failure)
            self._tied.add_gradients()
        return loss

    def sum_tied_gradients(self) -> None:
        """Sum the gradients of tied parameters over the stages that share them; collective over the stages.

        For several pipelines, which have to average gradients over the replicas first: only then have all replicas the
        same sum, to the bit, by any method. Call it between ``optimizer.synchronize()`` and the step::

            stage.step(inputs, targets)
            optimizer.synchronize()
            stage.sum_tied_gradients()
            with optimizer.skip_synchronize():
                optimizer.step()

        Optimizers that communicate inside ``step`` (`OneBitAdam`, ``synchronize="updates"``) cannot train tied
        parameters of replicas.

        Raises
        ------
        PipelineError
            No step was made since the last call, or the pipeline was made without `everyone`, so that `step` has summed
            them; on every stage.
        """
        self._tied.sum_averaged()

    def evaluate(self, inputs: Tensors = None, targets: Tensors = None) -> float:
        """Return the mean loss of a batch; collective.

        The module is in evaluation mode meanwhile, and so is a loss that is a module. Activations travel in full
        precision and are not kept.

        Parameters
        ----------
        inputs, targets
            As in `step`.

        Returns
        -------
        float
            The mean loss, on every stage.

        Raises
        ------
        PipelineError, CollectiveTimeout, PeerFailure
            As `step`.
        """
        output, failure = self._evaluate(inputs, targets)
        loss = 0.0
        if self.is_last and failure is None and output is not None:
            try:
                with torch.no_grad(), evaluating(self._loss):
                    loss = loss_of(self._loss, output, targets).item()
            except Exception as error:  # noqa: BLE001 - reported to all stages
                failure = error
        with share_with_replicas(self.everyone):
            return agree_on_end(self.comm, loss, failure)

    def predict(self, inputs: Tensors = None) -> Tensors:
        """Return the last stage's output for a batch; collective.

        The module and its activations are treated as in `evaluate`.

        Parameters
        ----------
        inputs : tensor[examples, ...], on the first stage
            Or several, as in `step`.

        Returns
        -------
        tensor or tensors
            On the last stage; None on the others.

        Raises
        ------
        PipelineError, CollectiveTimeout, PeerFailure
            As `step`.
        """
        output, failure = self._evaluate(inputs)
        with share_with_replicas(self.everyone):
            agree_on_end(self.comm, 0.0, failure)
        return output if self.is_last else None

    def _evaluate(self, inputs: Tensors, *targets: Tensors) -> tuple[Tensors, Exception | None]:
        """Run a batch forward, if all stages can begin; returns this stage's output and its failure."""
        last = self.is_last and bool(targets)
        part, fault = PartOfBatch.check(inputs, targets[0] if last else None, None, first=self.is_first, last=last)
        with share_with_replicas(self.everyone):
            listed = agree_on_batch(self.comm, part.examples, None, fault, (0, 0))
        return pass_forward(self.module, self._before, self._after, inputs, listed)

    def _actions(self, micro_batches: int) -> tuple[Action, ...]:
        """Return this stage's actions; collective over the stages where the last batch had another number."""
        if micro_batches != self._planned[0]:
            planned, failure = self._planned, None
            try:
                planned = micro_batches, self._plan(micro_batches)
            except Exception as error:  # noqa: BLE001 - a schedule is a function of the user's
                failure = error
            # before it is kept: otherwise a stage that failed alone would come here again without the others
            faults = self.comm.allgather_object(failure_text(failure))
            raise_faults(faults, "the step was not begun", failure)
            self._planned = planned
        return self._planned[1][self.stage]

    def _plan(self, micro_batches: int) -> list[tuple[Action, ...]]:
        """Return all stages' actions; ScheduleError unless they train a batch."""
        stages = all_stages(self._schedule, self.stages, micro_batches)
        prove(stages, micro_batches)
        return stages

    def _agree_on_ids(self, inputs: Tensors, targets: Tensors, ids: ArrayLike | None) -> Ids:
        """Return the ids of a step's examples, if all stages can begin."""
        before, after = (0 if cut is None else cut.checksum() for cut in (self._before, self._after))
        part, fault = PartOfBatch.check(
            inputs, targets, ids, first=self.is_first, last=self.is_last, cuts=self._sides.values()
        )
        try:
            return agree_on_batch(self.comm, part.examples, part.ids, fault, (before, after))
        except MessagesDiffer as error:
            for side, number in (("before", self.stage - 1), ("after", self.stage)):
                if number in error.cuts:
                    self._sides[side].lost = str(error)
            raise

    # States ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the number of steps, and the messages that are kept for examples; not the module's parameters.

        The state has tensors, numbers and texts alone, so ``torch.load`` reads it with its defaults.
        """
        states = {
            f"{name} {side}": with_tensors(state)
            for side, cut in self._sides.items()
            for name, state in cut.state_dict().items()
        }
        return {"stage": self.stage, "stages": self.stages, "steps": self.steps, "codings": states}

    def load_state_dict(self, state: State) -> None:
        """Go on from `state_dict`; collective. Messages that the two ends of a cut do not share are sent in full again.

        Parameters
        ----------
        state : dict
            This stage's; not changed.

        Raises
        ------
        PipelineError
            A state is that of another stage or pipeline, or damaged, or there is no room for it; on every stage. Unless
            the states are of other stages, messages that were kept before may be gone.
        """
        fault, cure = None, ": load the state that this stage has saved"
        sides: dict[str, State] = {}
        try:
            for key, one in state["codings"].items():
                name, _, side = key.rpartition(" ")
                sides.setdefault(side, {})[name] = one
            if (state["stage"], state["stages"]) != (self.stage, self.stages):
                fault = f"the state is that of stage {state['stage']} of {state['stages']}{cure}"
            elif set(sides) != set(self._sides):
                fault = f"the state has other cuts{cure}"
        except (AttributeError, LookupError, TypeError):
            fault = f"the state is {shown(state)}{cure}"
        self._load_cuts(state, fault, ((cut, sides[side]) for side, cut in self._sides.items()))

    def forget_cuts(self, sides: Iterable[str]) -> None:
        """Have all messages at the cuts "before" or "after" sent in full precision again; call it at both ends."""
        call_all(self._sides[side].forget_messages for side in sides)

    def stores_alike(self) -> bool:
        """Return True on every stage if both ends of every cut have kept the same messages; collective.

        Raises
        ------
        PipelineError
            Messages of a stage cannot be read; on every stage.
        """
        mine, fault = [0, 0], None
        try:
            mine = [0 if cut is None else cut.digest() for cut in (self._before, self._after)]
        except REFUSABLE as error:
            fault = failure_text(error)
        raise_faults(self.comm.allgather_object(fault), "the messages were not compared")
        everyones = self.comm.allgather(np.array([mine], np.int64))
        return bool((everyones[:-1, 1] == everyones[1:, 0]).all())
