"""One stage of a pipeline: a slice of a model on one rank, which trades activations and gradients with its neighbours.

A step cuts the batch into micro-batches and follows a schedule. Messages are in flight while others compute: each
receive is begun up to two actions ahead, and no send is waited for before the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveError
from mpicomp.pipeline.activations import Compression, Direct
from mpicomp.pipeline.agreement import Batch, agree_on_batch, agree_on_end, raise_first, shared_with_replicas
from mpicomp.pipeline.cut import CutEnd, Downstream, Upstream, check_compressions
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.link import REFUSABLE
from mpicomp.pipeline.rows import Ids
from mpicomp.pipeline.schedule import Schedule
from mpicomp.pipeline.schedule import schedule as schedule_of
from mpicomp.pipeline.step import Loss, NewGradients, Step, loss_of, pass_forward


class PipelineStage:
    """A rank's slice of a model that is spread over the ranks of a communicator, the first layers on rank 0.

    Parameters
    ----------
    module : nn.Module
        Takes one tensor and returns one: floating point, the examples of the micro-batch along its first dimension, and
        always of the same shape for an example.
    comm : Communicator
        Of the stages, in their order; see `Communicator.grid` for several pipelines side by side.
    micro_batches : int
        Into which a batch is cut.
    loss : callable, on the last stage
        ``loss(output, targets)`` of a micro-batch: a mean over its examples.
    schedule : "1f1b", "gpipe" or a function
        See `mpicomp.pipeline.schedule`.
    forward, backward : Direct or Deltas
        How activations and their gradients travel; the same on all stages. `Deltas` only forward.
    seed : int
        Of stochastic rounding; the same on all stages.
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
        schedule: str | Schedule = "1f1b",
        forward: Compression | None = None,
        backward: Compression | None = None,
        seed: int = 0,
        everyone: Communicator | None = None,
    ) -> None:
        self.module, self.comm, self._loss, self._everyone = module, comm, loss, everyone
        self.stage, self.stages, self.micro_batches = comm.rank, comm.size, micro_batches
        self.most_alive = self.steps = 0
        self._lost = ""  # what this stage could not keep
        self._before: Downstream | None = None
        self._after: Upstream | None = None
        compressions = forward or Direct(), backward or Direct()
        wrong: str | None = None
        try:
            self._check_arguments()
            check_compressions(compressions)
            self._actions = schedule_of(schedule)(self.stage, self.stages, micro_batches)
            if not self.is_first:
                self._before = Downstream(comm, self.stage - 1, self.stage - 1, compressions, seed)
            if not self.is_last:
                self._after = Upstream(comm, self.stage + 1, self.stage, compressions, seed)
        except (TypeError, ValueError) as error:
            wrong = str(error)
        said = f"{micro_batches} micro-batches, {schedule}, forward {forward}, backward {backward}, seed {seed}"
        said += "" if everyone is None else f", one of {everyone.size} stages of all replicas"
        answers = comm.allgather_object((wrong, said))
        raise_first((text for text, _ in answers), "the pipeline cannot be made")
        if len({text for _, text in answers}) > 1:
            told = "; ".join(f"stage {stage}: {text}" for stage, (_, text) in enumerate(answers))
            raise PipelineError(f"{comm.here}: the stages are given different options, give all the same: {told}")
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

    def step(self, inputs: Tensor | None = None, targets: Any = None, ids: Any = None) -> float:
        """Add the gradients of a batch's mean loss to ``.grad`` of the stage's parameters; collective.

        Parameters
        ----------
        inputs : tensor[examples, ...], on the first stage
        targets : tensor[examples, ...], on the last stage
        ids : integers[examples]
            Which examples these are, on all stages alike. `Deltas` needs them.

        Returns
        -------
        float
            The mean loss, on every stage.

        Raises
        ------
        PipelineError
            Something failed on a stage, which the error names; on every stage. Gradients that the step has added are
            gone, messages that are kept for examples are as before, and the step can be repeated.
        CollectiveTimeout, PeerFailure
            A stage does not answer. The communicator can be used no longer.
        """
        with shared_with_replicas(self._everyone):
            listed = self._agreed(inputs, targets, ids, self.micro_batches)
        run = Step(
            self.module, self._before, self._after, self._loss, inputs, targets, np.split(listed, self.micro_batches)
        )
        gradients = NewGradients(self.module)
        try:
            for number, action in enumerate(self._actions):
                run.take(action, self._actions[number + 1 : number + 3])
            run.finish()
            self.most_alive = max(self.most_alive, run.most_alive)
            with shared_with_replicas(self._everyone):
                loss = agree_on_end(self.comm, run.loss, run.failure)
        except BaseException as error:
            gradients.drop()
            for cut in self._cuts.values():
                cut.roll_back()
            if not isinstance(error, PipelineError | CollectiveError):  # such as KeyboardInterrupt: on this stage alone
                self.comm.give_up(error)
            raise
        try:
            for cut in self._cuts.values():
                cut.commit()
        except OSError as error:  # too late to take the step back on the other stages
            self._lost = f"messages of step {self.steps} could not be kept ({error}): load the last checkpoint"
        self.steps += 1
        return loss

    def evaluate(self, inputs: Tensor | None = None, targets: Any = None) -> float:
        """Mean loss of a batch, whose activations travel in full precision and are not kept; collective.

        Put the module into evaluation mode before. Arguments and errors are those of `step`.
        """
        with shared_with_replicas(self._everyone):
            listed = self._agreed(inputs, targets, None, None)
        output, failure = pass_forward(self.module, self._before, self._after, inputs, listed)
        loss = 0.0
        if self.is_last and output is not None:
            try:
                loss = loss_of(self._loss, output, targets).item()
            except Exception as error:  # noqa: BLE001 - told to all stages
                failure = error
        with shared_with_replicas(self._everyone):
            return agree_on_end(self.comm, loss, failure)

    def _agreed(self, inputs: Any, targets: Any, ids: Any, micro_batches: int | None) -> Ids:
        """Return the examples' ids, if all stages can begin; without micro-batches nothing is kept of examples."""
        batch, wrong = Batch(), None
        try:
            if self._lost:
                raise ValueError(self._lost)
            batch = Batch.of(inputs, targets, ids, first=self.is_first, last=self.is_last)
            for cut in self._cuts.values() if micro_batches else ():
                cut.check(batch.ids)
        except (TypeError, ValueError) as error:
            wrong = str(error)
        before, after = (0 if cut is None else cut.checksum() for cut in (self._before, self._after))
        return agree_on_batch(self.comm, batch, wrong, (before, after), micro_batches or 1)

    # States ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps made, and the messages that are kept for examples; not the module's parameters."""
        states = {
            f"{name} {side}": state for side, cut in self._cuts.items() for name, state in cut.state_dict().items()
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
        names = {side: {name: f"{name} {side}" for name in cut.codings} for side, cut in self._cuts.items()}
        if (state.get("stage"), state.get("stages")) != (self.stage, self.stages):
            wrong = f"the state is that of {place}: load what this stage has saved"
        elif set(state["codings"]) != {key for keys in names.values() for key in keys.values()}:
            wrong = "the state has other cuts: load what this stage has saved"
        raise_first(self.comm.allgather_object(wrong), "the state was not loaded")
        failure: str | None = None
        try:
            for side, cut in self._cuts.items():
                cut.load_state_dict({name: state["codings"][key] for name, key in names[side].items()})
        except (TypeError, KeyError, *REFUSABLE) as error:
            failure = str(error)
        raise_first(self.comm.allgather_object(failure), "the state was not loaded on all stages: load another")
        self.steps, self._lost = int(state["steps"]), ""
        self.compare_stores()

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on every stage."""
        for cut in self._cuts.values():
            cut.forget_messages()

    def compare_stores(self) -> int:
        """Have both ends of each cut forget the examples whose visits they count differently; how many; collective."""
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
