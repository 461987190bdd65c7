"""One stage of a pipeline: a slice of a model on one rank, which trades activations and gradients with its neighbours.

A step cuts the batch into micro-batches and follows a schedule. Messages are in flight while others compute: each
receive is begun up to two actions ahead, and no send is waited for before the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import numpy as np
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveError
from mpicomp.pipeline.activations import Compression, Direct
from mpicomp.pipeline.agreement import (
    Batch,
    MessagesDiffer,
    agree_on_batch,
    agree_on_end,
    job_rank,
    raise_first,
    shared_with_replicas,
)
from mpicomp.pipeline.cut import CutEnd, Downstream, Upstream, check_compressions
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.link import REFUSABLE
from mpicomp.pipeline.rows import Ids
from mpicomp.pipeline.schedule import Action, Schedule
from mpicomp.pipeline.schedule import schedule as schedule_of
from mpicomp.pipeline.states import with_arrays, with_tensors
from mpicomp.pipeline.step import Loss, Step, Undo, loss_of, pass_forward
from mpicomp.pipeline.tied import TiedParameters


class PipelineStage:
    """A rank's slice of a model that is spread over the ranks of a communicator, the first layers on rank 0.

    Parameters
    ----------
    module : nn.Module
        Takes what the stage before returns: a tensor, or tensors in tuples, lists and dictionaries. The examples of the
        micro-batch lie along the first dimension of each, and an example always has the same shape.
    comm : Communicator
        Of the stages, in their order; see `Communicator.grid` for several pipelines side by side.
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
        See `mpicomp.pipeline.schedule`.
    forward, backward : Direct or Deltas
        How activations and their gradients travel; the same on all stages. `Deltas` only forward.
    seed : int
        Of stochastic rounding; the same on all stages. Pipelines side by side draw independently under one seed.
    everyone : Communicator, optional
        Of the stages of all pipelines whose gradients are averaged: a step that fails in one of them then fails in all,
        with a PipelineError. Nobody may use it during a step.

    Attributes
    ----------
    most_alive : int
        Of how many micro-batches the stage has kept activations at one time, at most.
    steps : int
        Made so far.

    Raises
    ------
    PipelineError
        An argument is wrong on some stage, or differs from that of another; on every stage.
    """

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
        self.module, self.comm, self._loss, self._everyone = module, comm, loss, everyone
        self.stage, self.stages, self.micro_batches = comm.rank, comm.size, micro_batches
        self.most_alive = self.steps = 0
        self._before: Downstream | None = None
        self._after: Upstream | None = None
        compressions = forward or Direct(), backward or Direct()
        wrong: str | None = None
        try:
            self._check_arguments()
            check_compressions(compressions)
            self._schedule = schedule_of(schedule)
            self._planned = micro_batches, self._schedule(self.stage, self.stages, micro_batches)
            self.micro_batches, seed = index(micro_batches), index(seed)
        except (TypeError, ValueError) as error:
            wrong = str(error)
        said = f"{micro_batches} micro-batches, {schedule}, forward {forward}, backward {backward}, seed {seed}"
        said += "" if everyone is None else f", one of {everyone.size} stages of all replicas"
        answers = comm.allgather_object((wrong, said, job_rank(comm)))
        raise_first((text for text, _, _ in answers), "the pipeline cannot be made")
        if len({text for _, text, _ in answers}) > 1:
            told = "; ".join(f"stage {stage}: {text}" for stage, (_, text, _) in enumerate(answers))
            raise PipelineError(f"{comm.here}: the stages are given different options, give all the same: {told}")
        # The first stage's place in the job is another one in each of the pipelines side by side.
        pipeline = answers[0][2]
        if not self.is_first:
            self._before = Downstream(comm, self.stage - 1, self.stage - 1, compressions, seed, pipeline)
        if not self.is_last:
            self._after = Upstream(comm, self.stage + 1, self.stage, compressions, seed, pipeline)
        self._tied = TiedParameters(comm, tied or {}, deferred=everyone is not None)
        comm.start_progress_thread()  # where it is not supported, messages go on while the stage waits

    def _check_arguments(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"the module is a {type(self.module).__name__}: pass the stage's nn.Module")
        if self.is_last and not callable(self._loss):
            raise TypeError("the last stage has no loss: pass loss=, which is called with outputs and targets")

    @property
    def is_first(self) -> bool:
        """Whether the stage takes the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage takes the targets and has the loss."""
        return self.stage == self.stages - 1

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """By this stage, in steps: of activations, and of their gradients."""
        sent = [cut.bytes_sent for cut in self._cuts.values()]
        return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)

    @property
    def _cuts(self) -> dict[str, CutEnd]:
        """By the side on which they lie."""
        cuts: dict[str, CutEnd | None] = {"before": self._before, "after": self._after}
        return {side: cut for side, cut in cuts.items() if cut is not None}

    # Steps -----------------------------------------------------------------------------------------------------------

    def step(self, inputs: Any = None, targets: Any = None, ids: Any = None) -> float:
        """Add the gradients of a batch's mean loss to ``.grad`` of the stage's parameters; collective.

        Parameters
        ----------
        inputs : tensor[examples, ...], on the first stage
            Or several, in a tuple or dictionary.
        targets : tensor[examples, ...], on the last stage
            Or several, as above.
        ids : integers[examples]
            Which examples these are, on all stages alike. `Deltas` needs them.

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
        with shared_with_replicas(self._everyone):
            listed = self._agreed(inputs, targets, ids)
        micro_batches = min(self.micro_batches, listed.size)
        actions = self._actions(micro_batches)
        parts = np.array_split(listed, micro_batches)
        run = Step(self.module, self._before, self._after, self._loss, inputs, targets, parts)
        undo = Undo(self.module, self._loss)
        try:
            self._tied.begin(self.steps)
            for number, action in enumerate(actions):
                run.take(action, actions[number + 1 : number + 3])
            run.finish()
            self.most_alive = max(self.most_alive, run.most_alive)
            with shared_with_replicas(self._everyone):
                loss = agree_on_end(self.comm, run.loss, run.failure)
            self._tied.add_gradients()
        except BaseException as error:
            undo.restore()
            for cut in self._cuts.values():
                cut.roll_back()
            if not isinstance(error, PipelineError | CollectiveError):  # such as KeyboardInterrupt: on this stage alone
                self.comm.give_up(error)
            raise
        for cut in self._cuts.values():
            cut.commit(self.steps)
        self.steps += 1
        return loss

    def sum_tied_gradients(self) -> None:
        """Sum the gradients of tied parameters over the stages that share them; collective over the stages.

        For pipelines side by side, which have to average gradients over the replicas first: only then have all replicas
        the same sum, to the bit, by any method. Call it between ``optimizer.synchronize()`` and the step::

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

    def evaluate(self, inputs: Any = None, targets: Any = None) -> float:
        """Return the mean loss of a batch; collective.

        The module is in evaluation mode meanwhile. Activations travel in full precision and are not kept. Arguments and
        errors are those of `step`.
        """
        output, failure = self._evaluated(inputs, targets)
        loss = 0.0
        if self.is_last and failure is None and output is not None:
            try:
                with torch.no_grad():
                    loss = loss_of(self._loss, output, targets).item()
            except Exception as error:  # noqa: BLE001 - told to all stages
                failure = error
        with shared_with_replicas(self._everyone):
            return agree_on_end(self.comm, loss, failure)

    def predict(self, inputs: Any = None) -> Any:
        """Return the last stage's output for a batch, on that stage, and None on the others; collective.

        Otherwise as `evaluate`, without a loss.
        """
        output, failure = self._evaluated(inputs)
        with shared_with_replicas(self._everyone):
            agree_on_end(self.comm, 0.0, failure)
        return output if self.is_last else None

    def _evaluated(self, inputs: Any, *targets: Any) -> tuple[Any, Exception | None]:
        """Run a batch forward, if all stages can begin; returns this stage's output and its failure."""
        batch, wrong = Batch(), None
        try:
            last = self.is_last and bool(targets)
            batch = Batch.of(inputs, targets[0] if last else None, None, first=self.is_first, last=last)
        except (TypeError, ValueError) as error:
            wrong = str(error)
        with shared_with_replicas(self._everyone):
            listed = agree_on_batch(self.comm, batch, wrong, (0, 0))
        return pass_forward(self.module, self._before, self._after, inputs, listed)

    def _actions(self, micro_batches: int) -> tuple[Action, ...]:
        if micro_batches != self._planned[0]:
            self._planned = micro_batches, self._schedule(self.stage, self.stages, micro_batches)
        return self._planned[1]

    def _agreed(self, inputs: Any, targets: Any, ids: Any) -> Ids:
        """Return the ids of a step's examples, if all stages can begin."""
        batch, wrong = Batch(), None
        try:
            batch = Batch.of(inputs, targets, ids, first=self.is_first, last=self.is_last)
            for cut in self._cuts.values():
                cut.check(batch.ids)
        except (TypeError, ValueError) as error:
            wrong = str(error)
        before, after = (0 if cut is None else cut.checksum() for cut in (self._before, self._after))
        try:
            return agree_on_batch(self.comm, batch, wrong, (before, after))
        except MessagesDiffer as error:
            for side, number in (("before", self.stage - 1), ("after", self.stage)):
                if number in error.cuts:
                    self._cuts[side].lost = str(error)
            raise

    # States ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps made, and the messages that are kept for examples; not the module's parameters.

        It has tensors, numbers and texts alone, so ``torch.load`` reads it with its defaults.
        """
        states = {
            f"{name} {side}": with_tensors(state)
            for side, cut in self._cuts.items()
            for name, state in cut.state_dict().items()
        }
        return {"stage": self.stage, "stages": self.stages, "steps": self.steps, "codings": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; collective. What the two ends of a cut do not both have is sent in full again.

        Raises
        ------
        PipelineError
            A state is that of another stage or pipeline, or damaged, or there is no room for it; on every stage. Unless
            the states are of other stages, what was kept before may be gone.
        """
        wrong = None
        place = f"stage {state.get('stage')} of {state.get('stages')}"
        sides: dict[str, dict[str, Any]] = {}
        for key, one in state.get("codings", {}).items():
            name, _, side = key.rpartition(" ")
            sides.setdefault(side, {})[name] = with_arrays(one)
        if (state.get("stage"), state.get("stages")) != (self.stage, self.stages):
            wrong = f"the state is that of {place}: load what this stage has saved"
        elif set(sides) != set(self._cuts):
            wrong = "the state has other cuts: load what this stage has saved"
        raise_first(self.comm.allgather_object(wrong), "the state was not loaded")
        failure: str | None = None
        try:
            for side, cut in self._cuts.items():
                cut.load_state_dict(sides[side])
        except (TypeError, KeyError, *REFUSABLE) as error:
            failure = str(error)
        raise_first(self.comm.allgather_object(failure), "the state was not loaded on all stages: load another")
        self.steps = int(state["steps"])
        self.compare_stores()

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on every stage."""
        for cut in self._cuts.values():
            cut.forget_messages()

    def compare_stores(self) -> int:
        """Have both ends of each cut forget the examples whose messages they do not share; how many; collective."""
        return sum(cut.compare() for cut in (self._after, self._before) if cut is not None)

    def stores_alike(self) -> bool:
        """Whether both ends of every cut have kept the same messages; on every stage; collective."""
        mine = [0 if cut is None else cut.digest() for cut in (self._before, self._after)]
        everyones = self.comm.allgather(np.array([mine], np.int64))
        return bool((everyones[:-1, 1] == everyones[1:, 0]).all())

    def close(self) -> None:
        """Let go of messages that were kept, and of their files; the communicator stays open."""
        for cut in self._cuts.values():
            cut.close()
