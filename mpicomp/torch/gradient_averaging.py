"""The "gradients" mode: the ranks average their gradients, then every rank makes the same optimizer step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from collectives import Communicator
from mpicomp.torch.buckets import BucketReducer, NamedParameter
from mpicomp.torch.states import require_counters


class GradientAveraging:
    """Replaces each parameter's gradient by its mean over the ranks.

    A missing gradient counts as zeros and is present afterwards, so that the optimizer does the same on all ranks.
    """

    models_differ = False
    """The ranks' models are always equal."""

    def __init__(self, reducers: tuple[BucketReducer, ...], comm: Communicator) -> None:
        self.reducers = reducers
        self._comm = comm
        self.synchronizations = 0
        self._averaged = False

    def begin_step(self) -> None:
        """Nothing: the model is the common one."""

    def before_evaluation(self) -> None:
        """Forget what `synchronize` averaged: a closure is about to make new gradients."""
        self._averaged = False

    def take_gradients(self) -> None:
        """Average the gradients, which are there now, unless `synchronize` has."""
        self.synchronize()
        self._averaged = False

    def end_step(self) -> None:
        """Nothing: the ranks have made the same step."""

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the gradients now, for the step to come; once is enough."""
        if self._averaged:
            return
        for reducer in self.reducers:
            gradients = [self._gradient(member) for member in reducer.bucket.members]
            torch._foreach_copy_(reducer.vector_views, gradients)
            reducer.aggregate()
            torch._foreach_copy_(gradients, reducer.mean_views)
        self.synchronizations += 1
        self._averaged = True

    def drop_gradients(self, set_to_none: bool) -> None:
        """Forget that they were averaged; the optimizer, which holds the model's own parameters, clears them."""
        self._averaged = False

    def state_dict(self) -> dict[str, Any]:
        """The counter."""
        return {"rounds": self.synchronizations}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError if `state` is none that `load_state_dict` takes."""
        require_counters(state, "rounds")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.synchronizations = state["rounds"]

    def _gradient(self, member: NamedParameter) -> Tensor:
        parameter = member.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout != torch.strided:
            self._comm.reject(
                ValueError(
                    f"rank {self._comm.rank} of {self._comm.size}: the gradient of {member.name!r} is sparse, "
                    "which cannot be averaged element by element; build its layer with sparse=False or use "
                    'synchronize="updates"'
                ),
                "averaging gradients",
            )
        return parameter.grad
