"""A batch on its way through a slice of a model: forward and backward in micro-batches, or forward alone.

A slice lies between two cuts, or between a cut and an end of the model. What fails is kept, and the neighbours are
refused what they wait for, so that the step ends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives.errors import CollectiveError
from mpicomp.pipeline.cut import Downstream, Upstream
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.link import REFUSABLE, Arrays, Incoming
from mpicomp.pipeline.rows import Ids
from mpicomp.pipeline.schedule import Action, Forward
from mpicomp.pipeline.tensors import Parcel, arrived, as_rows, part_of

Loss = Callable[[Any, Any], Tensor]


class Step:
    """State of a slice in one step: micro-batches that have gone forward and not yet backward, and a failure.

    Parameters
    ----------
    module : nn.Module
        The slice.
    before : Downstream or None
        The cut before it; None: the model begins here.
    after : Upstream or None
        The cut behind it; None: the model ends here.
    loss : callable or None
        Where the model ends: a micro-batch's mean loss, of outputs and targets.
    inputs : tensors[examples, ...] or None
        Where the model begins.
    targets : tensors[examples, ...] or None
        Where the model ends.
    ids : sequence of int64[examples of a micro-batch]
        Each has one or more.

    Attributes
    ----------
    loss : float
        Of the micro-batches that have passed here, where the model ends.
    failure : Exception or None
        The first failure here.
    most_alive : int
        Micro-batches whose activations were kept at one time, at most.
    """

    def __init__(
        self,
        module: nn.Module,
        before: Downstream | None,
        after: Upstream | None,
        loss: Loss | None,
        inputs: Any,
        targets: Any,
        ids: Sequence[Ids],
    ) -> None:
        self._module, self._before, self._after, self._loss, self._ids = module, before, after, loss, ids
        ends = np.cumsum([0, *(one.size for one in ids)]).tolist()
        parts = [slice(*pair) for pair in pairwise(ends)]
        self._examples = ends[-1]
        self._inputs = [part_of(inputs, part) for part in parts] if before is None else [None] * len(ids)
        self._targets = [part_of(targets, part) for part in parts] if after is None else [None] * len(ids)
        self._alive: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.loss, self.most_alive = 0.0, 0
        self._refused = False  # a neighbour has failed
        self.failure: Exception | None = None
        self._expected: set[Action] = set()

    def take(self, action: Action, following: Sequence[Action] = ()) -> None:
        """Take one action, and begin to receive what those after it need."""
        for one in (action, *following):
            if one not in self._expected:
                self._expect(one)
        if isinstance(action, Forward):
            self._forward(action.micro_batch)
        else:
            self._backward(action.micro_batch)

    def finish(self) -> None:
        """Wait for what is still being sent."""
        for cut in (self._before, self._after):
            if cut is not None:
                cut.finish()

    def _expect(self, action: Action) -> None:
        ids = self._ids[action.micro_batch]
        if isinstance(action, Forward):
            for cut in (self._before, self._after):
                if cut is not None:
                    cut.prefetch(ids)
            link = None if self._before is None else self._before.activations
        else:
            link = None if self._after is None else self._after.gradients
        if link is not None and link.expect(ids):
            self._expected.add(action)

    def _forward(self, k: int) -> None:
        message, size = None, self._ids[k].size
        arrays = None if self._before is None else self._taken(self._before.activations, k)
        if self._goes_on:
            try:
                value, came = _received(self._inputs[k], self._before, arrays)
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
            except Exception as error:  # noqa: BLE001 - told to all ranks
                self._fail(error)
        if self._after is not None:
            self._fail(self._after.activations.send(message, self._ids[k]))
        for cut in (self._before, self._after):
            if cut is not None:
                cut.know_layouts()

    def _backward(self, k: int) -> None:
        message = None
        arrays = None if self._after is None else self._taken(self._after.gradients, k)
        if self._goes_on:
            try:
                came, outputs = self._alive.pop(k)
                gradients = [None] if arrays is None else [torch.from_numpy(one) for one in arrays]
                pairs = [
                    (output, None if gradient is None else gradient.to(output.dtype))
                    for output, gradient in zip(outputs, gradients, strict=True)
                    if output.requires_grad
                ]
                if pairs:  # else nothing of the slice is trained
                    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
                if self._before is not None and self._before.gradients.layout is not None:
                    rows = [np.zeros(one.shape, np.float32) if one.grad is None else as_rows(one.grad) for one in came]
                    message = self._before.gradients.layout, rows
            except Exception as error:  # noqa: BLE001 - told to all ranks
                self._fail(error)
        if self._before is not None:
            self._fail(self._before.gradients.send(message, self._ids[k]))

    def _taken(self, link: Incoming, k: int) -> Arrays | None:
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


class Undo:
    """Modules as they were before a step: gradients of parameters, and buffers such as running statistics.

    Parameters
    ----------
    *modules
        Others than `nn.Module` have nothing that changes.
    """

    def __init__(self, *modules: Any) -> None:
        found = [one for one in modules if isinstance(one, nn.Module)]
        parameters = {id(one): one for module in found for one in module.parameters()}.values()
        self._gradients = [(one, one.grad, _copy(one.grad)) for one in parameters]
        self._buffers = [
            (one, name, buffer, _copy(buffer))
            for module in found
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is None or not is_lazy(buffer)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """The step has failed."""
        for parameter, gradient, saved in self._gradients:
            parameter.grad = _restored(gradient, saved)
        for module, name, buffer, saved in self._buffers:
            module._buffers[name] = _restored(buffer, saved)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _restored(tensor: Tensor | None, saved: Tensor | None) -> Tensor | None:
    """Return the tensor as it was, in its own memory: others may have views of it."""
    if tensor is None or saved is None:
        return None
    if tensor.is_sparse:  # whose entries cannot be copied into
        return saved
    return tensor.copy_(saved)


@torch.no_grad()
def pass_forward(
    module: nn.Module, before: Downstream | None, after: Upstream | None, inputs: Any, ids: Ids
) -> tuple[Any, Exception | None]:
    """Run a batch forward through a slice, uncompressed and in evaluation mode; returns its output and its failure.

    Parameters are those of `Step`. There is no output where the slice, or one before it, has failed.
    """
    output, message, failure = None, None, None
    arrays = None if before is None else before.evaluated.take(ids)
    if before is None or arrays is not None:
        try:
            value, _ = _received(inputs, before, arrays, evaluating=True)
            with _evaluating(module):
                output = module(value)
            message = None if after is None else Parcel(output, ids.size, evaluating=True).message()
        except Exception as error:  # noqa: BLE001 - told to all ranks
            output, failure = None, error
    if after is not None:
        failure = after.evaluated.send(message, ids) or failure
    for cut in (before, after):
        if cut is not None:
            cut.finish_evaluation()
    return output, failure


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Layers that were in training mode are in evaluation mode meanwhile."""
    training = [one for one in module.modules() if one.training]
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True


def _received(
    inputs: Any, before: Downstream | None, arrays: Arrays | None, evaluating: bool = False
) -> tuple[Any, list[Tensor]]:
    """Return the input of a slice, and its tensors whose gradients go back."""
    if before is None or arrays is None:
        return inputs, []
    layout = (before.evaluated if evaluating else before.activations).layout
    assert layout is not None  # as there are arrays
    return arrived(layout, arrays)


def loss_of(loss: Loss | None, output: Any, targets: Any) -> Tensor:
    """A batch's loss, which is one number; else raises PipelineError."""
    assert loss is not None
    found = loss(output, targets)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise PipelineError("the loss is not one number: return the mean over the examples of a micro-batch")
    return found
