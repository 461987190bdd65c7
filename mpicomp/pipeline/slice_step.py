"""A batch on its way through a slice of a model: forward and backward in micro-batches, or forward alone.

A slice lies between two cuts, or between a cut and an end of the model. A failure is kept, and the neighbours receive
refusals in place of the messages that they wait for, so that the step ends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from collectives.errors import CollectiveError
from mpicomp.pipeline.agreement import PipelineError
from mpicomp.pipeline.cut import CutEnd, Downstream, Upstream
from mpicomp.pipeline.message_layout import Tensors
from mpicomp.pipeline.messages import REFUSABLE, Incoming
from mpicomp.pipeline.schedule import Action, Forward
from mpicomp.pipeline.store_rows import Ids
from mpicomp.pipeline.tensors import Arrays, Parcel, as_rows, examples_of, part_of, unpack

Loss = Callable[[Tensors, Tensors], Tensor]


@dataclass(frozen=True)
class PartOfBatch:
    """The part of a batch that a rank was given."""

    examples: int = -1  # -1: no part
    ids: Ids | None = None

    @classmethod
    def check(
        cls,
        inputs: Tensors,
        targets: Tensors,
        ids: ArrayLike | None,
        *,
        first: bool,
        last: bool,
        cuts: Iterable[CutEnd] = (),
    ) -> tuple[PartOfBatch, str | None]:
        """Return a rank's part of a batch, and the fault for which no step over the `cuts` can begin, or None."""
        try:
            found = cls._of(inputs, targets, ids, first, last)
            for cut in cuts:
                cut.check(found.ids)
        except (TypeError, ValueError) as error:
            return cls(), str(error)
        return found, None

    @classmethod
    def _of(cls, inputs: Tensors, targets: Tensors, ids: ArrayLike | None, first: bool, last: bool) -> PartOfBatch:
        sizes = {}
        if first:
            if not (isinstance(inputs, tuple | dict) or (isinstance(inputs, Tensor) and inputs.ndim)):
                raise TypeError("the first stage has no inputs: pass a tensor with an example in each row")
            sizes["inputs"] = examples_of(inputs)
        if last:
            if targets is None:
                raise TypeError("the last stage has no targets: pass a tensor with an example in each row")
            sizes["targets"] = examples_of(targets)
        listed = None
        if ids is not None:
            given = np.asarray(ids)
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise TypeError(f"ids are {given.dtype}{list(given.shape)}: pass an integer for each example")
            listed = given.astype(np.int64)
            sizes["ids"] = listed.size
        if len(set(sizes.values())) > 1:
            raise ValueError(f"there are {', '.join(f'{size} {name}' for name, size in sizes.items())}")
        if 0 in sizes.values():
            raise ValueError("the batch is empty: leave it out on every stage")
        return cls(next(iter(sizes.values()), -1), listed)

    @property
    def listed(self) -> Ids:
        """The ids, or numbers in place of them."""
        return np.arange(max(self.examples, 0)) if self.ids is None else self.ids


class SliceStep:
    """State of a slice in one step: micro-batches gone forward and not yet backward, and the first failure."""

    def __init__(
        self,
        module: nn.Module,
        before: Downstream | None,
        after: Upstream | None,
        ids: Sequence[Ids],
        *,
        loss: Loss | None = None,
        inputs: Tensors = None,
        targets: Tensors = None,
    ) -> None:
        # without a cut before it, the slice begins the model and takes inputs; without one after it, it ends the model
        self._module, self._before, self._after, self._loss, self._ids = module, before, after, loss, ids
        self._cuts = [cut for cut in (before, after) if cut is not None]
        ends = np.cumsum([0, *(one.size for one in ids)]).tolist()
        parts = [slice(*pair) for pair in pairwise(ends)]
        self._examples = ends[-1]
        self._inputs = [part_of(inputs, part) for part in parts] if before is None else [None] * len(ids)
        self._targets = [part_of(targets, part) for part in parts] if after is None else [None] * len(ids)
        self._alive: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        # the loss where the model ends; and the most micro-batches whose activations were kept at one time
        self.loss, self.most_alive = 0.0, 0
        self._refused = False  # a neighbour has failed
        self.failure: Exception | None = None
        self._expected: set[Action] = set()

    def take(self, action: Action, following: Sequence[Action] = ()) -> None:
        """Take one action, and begin to receive the messages of the following ones."""
        for one in (action, *following):
            if one not in self._expected:
                self._expect(one)
        if isinstance(action, Forward):
            self._forward(action.micro_batch)
        else:
            self._backward(action.micro_batch)

    def finish(self) -> None:
        """Wait for the messages in flight."""
        for cut in self._cuts:
            cut.finish()

    def _expect(self, action: Action) -> None:
        ids = self._ids[action.micro_batch]
        if isinstance(action, Forward):
            for cut in self._cuts:
                try:
                    cut.prefetch(ids)
                except REFUSABLE as error:  # messages of an earlier step could not be written
                    self._fail(error)
            link = None if self._before is None else self._before.activations
        else:
            link = None if self._after is None else self._after.gradients
        if link is not None and link.expect(ids):
            self._expected.add(action)

    def _forward(self, k: int) -> None:
        message, size = None, self._ids[k].size
        arrays = None if self._before is None else self._take_arrays(self._before.activations, k)
        if self._goes_on:
            try:
                value, came = _receive(self._inputs[k], self._before, arrays)
                output = self._module(value)
                if self._after is None:
                    # a division by the number of micro-batches, where these are of one size
                    loss = loss_of(self._loss, output, self._targets[k]) / (self._examples / size)
                    self.loss += loss.item()
                    self._alive[k] = came, [loss]
                else:
                    parcel = Parcel(output, size, self._after.activations.layout)
                    message = parcel.message()
                    self._alive[k] = came, parcel.coded
                self.most_alive = max(self.most_alive, len(self._alive))
            except Exception as error:  # noqa: BLE001 - reported to all ranks
                self._fail(error)
        if self._after is not None:
            self._fail(self._after.activations.send(message, self._ids[k]))
        for cut in self._cuts:
            cut.share_layout()

    def _backward(self, k: int) -> None:
        message = None
        arrays = None if self._after is None else self._take_arrays(self._after.gradients, k)
        if self._goes_on:
            try:
                came, outputs = self._alive.pop(k)
                gradients = [None] if arrays is None else [torch.from_numpy(one) for one in arrays]
                pairs = [
                    (output, None if gradient is None else gradient.to(output.dtype))
                    for output, gradient in zip(outputs, gradients, strict=True)
                    if output.requires_grad
                ]
                if pairs:  # else the slice is not trained
                    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
                if self._before is not None and self._before.gradients.layout is not None:
                    rows = [np.zeros(one.shape, np.float32) if one.grad is None else as_rows(one.grad) for one in came]
                    message = self._before.gradients.layout, rows
            except Exception as error:  # noqa: BLE001 - reported to all ranks
                self._fail(error)
        if self._before is not None:
            self._fail(self._before.gradients.send(message, self._ids[k]))

    def _take_arrays(self, link: Incoming, k: int) -> Arrays | None:
        try:
            rows = link.take(self._ids[k])
        except CollectiveError:
            raise
        except REFUSABLE as error:  # the message cannot be decoded
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


@torch.no_grad()
def pass_forward(
    module: nn.Module, before: Downstream | None, after: Upstream | None, inputs: Tensors, ids: Ids
) -> tuple[Tensors, Exception | None]:
    """Run a batch forward through a slice, uncompressed and in evaluation mode; return its output and its failure."""
    # no output where this slice, or one before it, has failed
    output, message, failure = None, None, None
    arrays = None if before is None else before.evaluated.take(ids)
    if before is None or arrays is not None:
        try:
            value, _ = _receive(inputs, before, arrays, evaluating=True)
            with evaluating(module):
                output = module(value)
            message = None if after is None else Parcel(output, ids.size, evaluating=True).message()
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            output, failure = None, error
    if after is not None:
        failure = after.evaluated.send(message, ids) or failure
    for cut in (before, after):
        if cut is not None:
            cut.finish_evaluation()
    return output, failure


@contextmanager
def evaluating(module: object) -> Iterator[None]:
    """Have layers that are in training mode in evaluation mode meanwhile; a loss may be a function without layers."""
    training = [one for one in module.modules() if one.training] if isinstance(module, nn.Module) else []
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True


def _receive(
    inputs: Tensors, before: Downstream | None, arrays: Arrays | None, evaluating: bool = False
) -> tuple[Tensors, list[Tensor]]:
    """Return the input of a slice, and its tensors whose gradients go back."""
    if before is None or arrays is None:
        return inputs, []
    layout = (before.evaluated if evaluating else before.activations).layout
    assert layout is not None  # as there are arrays
    return unpack(layout, arrays)


def loss_of(loss: Loss | None, output: Tensors, targets: Tensors) -> Tensor:
    """Return a batch's loss, which is one number; else raises PipelineError."""
    assert loss is not None
    found = loss(output, targets)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise PipelineError("the loss is not one number: return the mean over the examples of a micro-batch")
    return found
