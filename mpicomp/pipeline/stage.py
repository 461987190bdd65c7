"""One stage of a pipeline: a slice of a model on one rank, which trades activations and gradients with its neighbours.

A step cuts the batch into micro-batches and follows a schedule. Messages are in flight while others compute: each
receive is begun one action ahead, and no send is waited for before the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveError
from mpicomp.pipeline.activations import Coding, Compression, Deltas, Direct
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.link import REFUSABLE, Incoming, Outgoing
from mpicomp.pipeline.schedule import Action, Forward, Schedule
from mpicomp.pipeline.schedule import schedule as schedule_of
from mpicomp.pipeline.stamps import differing

_ACTIVATIONS, _GRADIENTS, _EVALUATION = 0, 2, 4  # tags; a shape travels under the next one
_SENT = (torch.float32, torch.float16, torch.bfloat16)  # as float32

Loss = Callable[[Tensor, Any], Tensor]
Ids = NDArray[np.int64]


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
    ) -> None:
        self.module, self.comm, self._loss = module, comm, loss
        self.stage, self.stages, self.micro_batches = comm.rank, comm.size, micro_batches
        self.most_alive = self.steps = 0
        self._lost = ""  # what this stage could not keep
        self._compression = forward or Direct(), backward or Direct()
        self._before: Incoming | None = None
        self._gradients_before: Outgoing | None = None
        self._evaluated_before: Incoming | None = None
        self._after: Outgoing | None = None
        self._gradients_after: Incoming | None = None
        self._evaluated_after: Outgoing | None = None
        self._codings: dict[str, Coding] = {}
        wrong = self._prepare(schedule, seed)
        said = f"{micro_batches} micro-batches, {schedule}, forward {forward}, backward {backward}, seed {seed}"
        answers = comm.allgather_object((wrong, said))
        _raise_first(answers, "the pipeline cannot be made")
        if len({text for _, text in answers}) > 1:
            told = "; ".join(f"stage {stage}: {text}" for stage, (_, text) in enumerate(answers))
            raise PipelineError(f"{comm.here}: the stages are given different options, give all the same: {told}")
        comm.start_progress_thread()  # where it is not supported, messages go on while the stage waits

    def _prepare(self, chosen: str | Schedule, seed: int) -> str | None:
        """Make what a step needs; returns what is wrong with the arguments."""
        try:
            if not isinstance(self.module, nn.Module):
                raise TypeError(f"the module is a {type(self.module).__name__}: pass the stage's nn.Module")
            if self.is_last and not callable(self._loss):
                raise TypeError("the last stage has no loss: pass loss=, which is called with outputs and targets")
            if isinstance(self._compression[1], Deltas):
                raise TypeError(
                    "gradients are no messages of examples that settle: pass Direct as backward=, not Deltas"
                )
            self._actions = schedule_of(chosen)(self.stage, self.stages, self.micro_batches)
            into, out = self._codings_of(self.stage - 1, "after", seed), self._codings_of(self.stage, "before", seed)
        except (TypeError, ValueError) as error:
            return str(error)
        self._codings = into | out
        before, after, plain = self.stage - 1, self.stage + 1, Direct().start(0, 0, "")
        if into:
            self._before = Incoming(self.comm, before, _ACTIVATIONS, into["activations before"])
            self._gradients_before = Outgoing(self.comm, before, _GRADIENTS, into["gradients before"], tells=False)
            self._evaluated_before = Incoming(self.comm, before, _EVALUATION, plain)
        if out:
            self._after = Outgoing(self.comm, after, _ACTIVATIONS, out["activations after"])
            self._gradients_after = Incoming(self.comm, after, _GRADIENTS, out["gradients after"], tells=False)
            self._evaluated_after = Outgoing(self.comm, after, _EVALUATION, plain)
        return None

    def _codings_of(self, cut: int, end: str, seed: int) -> dict[str, Coding]:
        """Of the cut behind stage `cut`, whose `end` this stage is; nothing where there is no such cut."""
        if not 0 <= cut < self.stages - 1:
            return {}
        forward, backward = self._compression
        side = "before" if end == "after" else "after"
        return {
            f"activations {side}": forward.start(seed, 2 * cut, end),
            f"gradients {side}": backward.start(seed, 2 * cut + 1, end),
        }

    @property
    def is_first(self) -> bool:
        """Whether the stage takes the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage takes the targets and has the loss."""
        return self.stage == self.stages - 1

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
        ids = self._agreed(inputs, targets, ids)
        run = _Step(self, inputs, targets, np.split(ids, self.micro_batches))
        had = [parameter.grad is not None for parameter in self.module.parameters()]
        try:
            for number, action in enumerate(self._actions):
                run.take(action, self._actions[number + 1 : number + 2])
            run.finish()
            self.most_alive = max(self.most_alive, run.most_alive)
            loss = self._end(run.loss, run.failure)
        except BaseException as error:
            self._roll_back(had)
            if not isinstance(error, PipelineError | CollectiveError):  # such as KeyboardInterrupt: on this stage alone
                self.comm.give_up(error)
            raise
        try:
            for coding in self._codings.values():
                coding.commit()
        except OSError as error:  # too late to take the step back on the other stages
            self._lost = f"messages of step {self.steps} could not be kept ({error}): load the last checkpoint"
        self.steps += 1
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensor | None = None, targets: Any = None) -> float:
        """Mean loss of a batch, whose activations travel in full precision and are not kept; collective.

        Put the module into evaluation mode before. Arguments and errors are those of `step`.
        """
        ids = self._agreed(inputs, targets, None, 1)
        failure: Exception | None = None
        loss = 0.0
        arrived = None if self._evaluated_before is None else self._evaluated_before.take(ids)
        if self.is_first or arrived is not None:
            try:
                output = self.module(inputs if arrived is None else torch.from_numpy(arrived))
                loss = self._loss_of(output, targets).item() if self._loss and self.is_last else 0.0
                rows = None if self.is_last else _rows(output, ids.size)
            except Exception as error:  # noqa: BLE001 - told to all stages
                failure, rows = error, None
        else:
            rows = None
        if self._evaluated_after is not None:
            failure = self._evaluated_after.send(rows, ids) or failure
        for link in (self._evaluated_before, self._evaluated_after):
            if link is not None:
                link.finish()
                link.forget_shape()
        return self._end(loss, failure)

    def _loss_of(self, output: Tensor, targets: Any) -> Tensor:
        assert self._loss is not None
        loss = self._loss(output, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PipelineError("the loss is not one number: return the mean over the examples of a micro-batch")
        return loss

    def _agreed(self, inputs: Any, targets: Any, ids: Any, parts: int | None = None) -> Ids:
        """Return the ids of the examples of all stages; PipelineError on every stage if these differ."""
        wrong, mine, listed = None, -1, np.zeros(0, np.int64)
        try:
            if self._lost:
                raise ValueError(self._lost)
            mine, listed = self._examined(inputs, targets, ids, parts or self.micro_batches)
        except (TypeError, ValueError) as error:
            wrong = str(error)
        mark = int.from_bytes(_digest(listed), "little", signed=True) if ids is not None else 0
        kept = [self._checksum(side) for side in ("before", "after")]
        everyones = self.comm.allgather(np.array([[wrong is not None, mine, mark, *kept]], np.int64))
        if everyones[:, 0].any():
            _raise_first(self.comm.allgather_object((wrong, "")), "the step was not begun")
        for cut in np.flatnonzero(everyones[:-1, 4] != everyones[1:, 3]).tolist():
            raise PipelineError(
                f"{self.comm.here}: stages {cut} and {cut + 1} have kept different messages of the same examples: "
                "load the last checkpoint, or call forget_messages() on all stages, and all are sent in full again"
            )
        sizes = {int(size) for size in everyones[:, 1] if size >= 0}
        marks = {int(one) for one in everyones[:, 2]}
        if len(sizes) != 1 or len(marks) != 1:
            told = ", ".join(
                f"stage {stage}: {'any number' if size < 0 else size} of examples, ids {one & 0xFFFFFFFF:08x}"
                for stage, (_, size, one, *_) in enumerate(everyones.tolist())
            )
            raise PipelineError(
                f"{self.comm.here}: the stages are given different batches: {told}; give all of them the same examples "
                "in the same order"
            )
        (examples,) = sizes
        if examples % (parts or self.micro_batches):
            raise PipelineError(
                f"{self.comm.here}: {examples} examples do not divide into {self.micro_batches} micro-batches: leave "
                "some out, as drop_last of a DataLoader does"
            )
        return np.arange(examples) if ids is None else listed

    def _checksum(self, side: str) -> int:
        """Of what the cut on this side has kept, as a signed number; 0 where it is not time for one."""
        coding = self._codings.get(f"activations {side}")
        return int(np.uint64((coding and coding.checksum()) or 0).astype(np.int64))

    def _examined(self, inputs: Any, targets: Any, ids: Any, parts: int) -> tuple[int, Ids]:
        sizes = {}
        if self.is_first:
            if not isinstance(inputs, Tensor) or not inputs.ndim:
                raise TypeError("the first stage has no inputs: pass a tensor with an example in each row")
            sizes["inputs"] = len(inputs)
        if self.is_last:
            if targets is None:
                raise TypeError("the last stage has no targets: pass a tensor with an example in each row")
            sizes["targets"] = len(targets)
        listed = np.zeros(0, np.int64)
        if ids is not None:
            given = np.asarray(ids)
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise TypeError(f"ids are {given.dtype}{list(given.shape)}: pass an integer for each example")
            listed = given.astype(np.int64)
            sizes["ids"] = listed.size
        if ids is not None or parts == self.micro_batches:
            for coding in self._codings.values():
                coding.check(listed if ids is not None else None, parts)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"there are {', '.join(f'{size} {name}' for name, size in sizes.items())}")
        if 0 in sizes.values():
            raise ValueError("the batch is empty: leave it out on every stage")
        return next(iter(sizes.values()), -1), listed

    def _end(self, loss: float, failure: Exception | None) -> float:
        """The loss, if no stage has failed; else PipelineError on every stage."""
        mine = np.array([[loss, failure is not None]], np.float64)
        everyones = self.comm.allgather(mine)
        if everyones[:, 1].any():
            text = None if failure is None else f"{type(failure).__name__}: {failure}"
            _raise_first(self.comm.allgather_object((text, "")), "the step failed", failure)
        return float(everyones[-1, 0])

    def _roll_back(self, had: list[bool]) -> None:
        for parameter, kept in zip(self.module.parameters(), had, strict=True):
            if not kept:
                parameter.grad = None
        for coding in self._codings.values():
            coding.roll_back()

    # States ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps made, and the messages that are kept for examples; not the module's parameters."""
        states = {name: coding.state_dict() for name, coding in self._codings.items()}
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
        if (state.get("stage"), state.get("stages")) != (self.stage, self.stages):
            wrong = f"the state is that of {place}: load what this stage has saved"
        elif set(state["codings"]) != set(self._codings):
            wrong = "the state has other cuts: load what this stage has saved"
        _raise_first(self.comm.allgather_object((wrong, "")), "the state was not loaded")
        failure: str | None = None
        try:
            for name, coding in self._codings.items():
                coding.load_state_dict(state["codings"][name])
        except (TypeError, KeyError, *REFUSABLE) as error:
            failure = str(error)
        _raise_first(self.comm.allgather_object((failure, "")), "the state was not loaded on all stages: load another")
        self.steps, self._lost = int(state["steps"]), ""
        self.compare_stores()

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on every stage."""
        for coding in self._codings.values():
            stamps = coding.stamps()
            if stamps is not None:
                rows = np.flatnonzero(stamps)
                coding.forget(rows, stamps[rows])
                coding.checksum()

    def compare_stores(self) -> int:
        """Have both ends of each cut forget the examples whose visits they count differently; how many; collective."""
        forgotten = 0
        for end, other in (("after", self.stage + 1), ("before", self.stage - 1)):
            coding = self._codings.get(f"activations {end}")
            stamps = None if coding is None else coding.stamps()
            if coding is None or stamps is None:
                continue
            theirs = np.empty_like(stamps)
            receiving = self.comm.irecv(theirs.view(np.int32), other, _EVALUATION)
            self.comm.send(stamps.view(np.int32), other, _EVALUATION)
            receiving.wait()
            rows = differing(stamps, theirs)
            coding.forget(rows, theirs[rows])
            forgotten += rows.size
        return forgotten


class _Step:
    """What one step of a stage keeps: micro-batches that have gone forward and not yet backward, and what failed."""

    def __init__(self, stage: PipelineStage, inputs: Any, targets: Any, ids: list[Ids]) -> None:
        self._stage, self._ids = stage, ids
        size = ids[0].size
        parts = [slice(k * size, (k + 1) * size) for k in range(len(ids))]
        self._inputs = [inputs[part] for part in parts] if stage.is_first else [None] * len(ids)
        self._targets = [targets[part] for part in parts] if stage.is_last else [None] * len(ids)
        self._alive: dict[int, tuple[Any, Any]] = {}
        self.loss, self.most_alive = 0.0, 0
        self._refused = False  # a neighbour has failed
        self.failure: Exception | None = None
        self._expected: set[Action] = set()

    def take(self, action: Action, following: tuple[Action, ...]) -> None:
        """Take one action, and begin to receive what the one after it needs."""
        for one in (action, *following):
            self._expect(one)
        if isinstance(action, Forward):
            self._forward(action.micro_batch)
        else:
            self._backward(action.micro_batch)

    def _expect(self, action: Action) -> None:
        if isinstance(action, Forward) and action not in self._expected:
            for side in ("before", "after"):
                coding = self._stage._codings.get(f"activations {side}")
                if coding is not None:
                    coding.prefetch(self._ids[action.micro_batch])
        link = self._stage._before if isinstance(action, Forward) else self._stage._gradients_after
        if link is not None and action not in self._expected and link.expect(self._ids[action.micro_batch]):
            self._expected.add(action)

    def _forward(self, k: int) -> None:
        stage, rows = self._stage, None
        arrived = self._taken(stage._before, k)
        if self._goes_on:
            try:
                into = self._inputs[k] if arrived is None else torch.from_numpy(arrived).requires_grad_()
                output = stage.module(into)
                if stage.is_last:
                    output = stage._loss_of(output, self._targets[k]) / len(self._ids)
                    self.loss += output.item()
                else:
                    rows = _rows(output.detach() if isinstance(output, Tensor) else output, self._ids[k].size)
                self._alive[k] = into, output
                self.most_alive = max(self.most_alive, len(self._alive))
            except Exception as error:  # noqa: BLE001 - told to all stages
                self._fail(error)
        if stage._after is not None:
            self._fail(stage._after.send(rows, self._ids[k]))
        self._know_shapes()

    def _backward(self, k: int) -> None:
        stage, rows = self._stage, None
        arrived = self._taken(stage._gradients_after, k)
        if self._goes_on:
            try:
                into, output = self._alive.pop(k)
                gradient = None if arrived is None else torch.from_numpy(arrived).to(output.dtype)
                if output.requires_grad:  # else nothing of the stage is trained
                    torch.autograd.backward(output, gradient)
                if not stage.is_first:
                    rows = np.zeros(into.shape, np.float32) if into.grad is None else _rows(into.grad, len(into))
            except Exception as error:  # noqa: BLE001 - told to all stages
                self._fail(error)
        if stage._gradients_before is not None:
            self._fail(stage._gradients_before.send(rows, self._ids[k]))

    def _know_shapes(self) -> None:
        """Gradients have the shapes of the activations that have passed."""
        stage = self._stage
        if stage._before is not None and stage._gradients_before is not None:
            stage._gradients_before.row_shape = stage._before.row_shape
        if stage._after is not None and stage._gradients_after is not None:
            stage._gradients_after.row_shape = stage._after.row_shape

    def _taken(self, link: Incoming | None, k: int) -> NDArray[np.float32] | None:
        if link is None:
            return None
        try:
            rows = link.take(self._ids[k])
        except CollectiveError:
            raise
        except REFUSABLE as error:  # what came cannot be decoded
            self._fail(error)
            return None
        self._refused |= rows is None
        return rows

    @property
    def _goes_on(self) -> bool:
        return self.failure is None and not self._refused

    def _fail(self, error: Exception | None) -> None:
        if error is not None and self.failure is None:
            self.failure = error
        if not self._goes_on:
            self._alive.clear()

    def finish(self) -> None:
        """Wait for what is still being sent."""
        stage = self._stage
        for link in (stage._before, stage._gradients_after, stage._after, stage._gradients_before):
            if link is not None:
                link.finish()


def _rows(output: Any, examples: int) -> NDArray[np.float32]:
    """What is sent of a stage's output."""
    if not isinstance(output, Tensor) or output.dtype not in _SENT:
        what = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise PipelineError(
            f"the stage returns {what}: let its module return one tensor of float32, float16 or bfloat16"
        )
    if output.ndim < 2 or len(output) != examples:
        raise PipelineError(
            f"the stage returns shape {list(output.shape)} for {examples} examples: keep the examples along the first "
            "of two or more dimensions"
        )
    return output.to(torch.float32).contiguous().numpy()


def _digest(ids: Ids) -> bytes:
    import hashlib

    return hashlib.blake2b(ids.tobytes(), digest_size=8).digest()


def _raise_first(answers: list[tuple[str | None, str]], what: str, cause: Exception | None = None) -> None:
    """Raise PipelineError with what is wrong on the stages, if anything is."""
    told = [f"stage {stage}: {wrong}" for stage, (wrong, _) in enumerate(answers) if wrong is not None]
    if told:
        raise PipelineError(f"{what}: {'; '.join(told)}") from cause
