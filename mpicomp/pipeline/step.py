"""A batch on its way through a slice of a model: forward and backward in micro-batches, or forward alone.

A slice lies between two cuts, or between a cut and an end of the model. What fails is kept, and the neighbours are
refused what they wait for, so that the step ends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collectives.errors import CollectiveError
from mpicomp.pipeline.cut import Downstream, Upstream
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.link import REFUSABLE, Incoming
from mpicomp.pipeline.rows import Ids
from mpicomp.pipeline.schedule import Action, Forward

_SENT = (torch.float32, torch.float16, torch.bfloat16)  # as float32

Loss = Callable[[Tensor, Any], Tensor]


class Step:
    """What a slice keeps in one step: micro-batches that have gone forward and not yet backward, and what failed.

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
    inputs : tensor[examples, ...] or None
        Where the model begins.
    targets : tensor[examples, ...] or None
        Where the model ends.
    ids : sequence of int64[examples of a micro-batch]
        Equally many examples of each micro-batch.

    Attributes
    ----------
    loss : float
        Of the micro-batches that have passed here, where the model ends.
    failure : Exception or None
        What failed here first.
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
        parts = [slice(k * ids[0].size, (k + 1) * ids[0].size) for k in range(len(ids))]
        self._inputs = [inputs[part] for part in parts] if before is None else [None] * len(ids)
        self._targets = [targets[part] for part in parts] if after is None else [None] * len(ids)
        self._alive: dict[int, tuple[Any, Any]] = {}
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
        rows = None
        arrived = None if self._before is None else self._taken(self._before.activations, k)
        if self._goes_on:
            try:
                into = self._inputs[k] if arrived is None else torch.from_numpy(arrived).requires_grad_()
                output = self._module(into)
                if self._after is None:
                    output = loss_of(self._loss, output, self._targets[k]) / len(self._ids)
                    self.loss += output.item()
                else:
                    rows = rows_of(output.detach() if isinstance(output, Tensor) else output, self._ids[k].size)
                self._alive[k] = into, output
                self.most_alive = max(self.most_alive, len(self._alive))
            except Exception as error:  # noqa: BLE001 - told to all ranks
                self._fail(error)
        if self._after is not None:
            self._fail(self._after.activations.send(rows, self._ids[k]))
        for cut in (self._before, self._after):
            if cut is not None:
                cut.know_shapes()

    def _backward(self, k: int) -> None:
        rows = None
        arrived = None if self._after is None else self._taken(self._after.gradients, k)
        if self._goes_on:
            try:
                into, output = self._alive.pop(k)
                gradient = None if arrived is None else torch.from_numpy(arrived).to(output.dtype)
                if output.requires_grad:  # else nothing of the slice is trained
                    torch.autograd.backward(output, gradient)
                if self._before is not None:
                    rows = np.zeros(into.shape, np.float32) if into.grad is None else rows_of(into.grad, len(into))
            except Exception as error:  # noqa: BLE001 - told to all ranks
                self._fail(error)
        if self._before is not None:
            self._fail(self._before.gradients.send(rows, self._ids[k]))

    def _taken(self, link: Incoming, k: int) -> NDArray[np.float32] | None:
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


class NewGradients:
    """Those that a step adds to parameters that have none before.

    Parameters
    ----------
    *modules : nn.Module
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._parameters = [one for module in modules for one in module.parameters() if one.grad is None]

    def drop(self) -> None:
        """The step has failed."""
        for parameter in self._parameters:
            parameter.grad = None


@torch.no_grad()
def pass_forward(
    module: nn.Module, before: Downstream | None, after: Upstream | None, inputs: Any, ids: Ids
) -> tuple[Any, Exception | None]:
    """Run a batch forward through a slice, uncompressed; returns its output and what failed.

    Parameters are those of `Step`. There is no output where the slice, or one before it, has failed.
    """
    output, rows, failure = None, None, None
    arrived = None if before is None else before.evaluated.take(ids)
    if before is None or arrived is not None:
        try:
            output = module(inputs if arrived is None else torch.from_numpy(arrived))
            rows = None if after is None else rows_of(output, ids.size)
        except Exception as error:  # noqa: BLE001 - told to all ranks
            output, failure = None, error
    if after is not None:
        failure = after.evaluated.send(rows, ids) or failure
    for cut in (before, after):
        if cut is not None:
            cut.finish_evaluation()
    return output, failure


def loss_of(loss: Loss | None, output: Tensor, targets: Any) -> Tensor:
    """A batch's loss, which is one number; else raises PipelineError."""
    assert loss is not None
    found = loss(output, targets)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise PipelineError("the loss is not one number: return the mean over the examples of a micro-batch")
    return found


def rows_of(output: Any, examples: int) -> NDArray[np.float32]:
    """What is sent of a slice's output; raises PipelineError if it cannot be."""
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
