"""The "updates" mode: each rank's optimizer moves its own copy of the model, then the ranks average the moves.

From the common model x, H optimizer steps lead to x_local. The synchronization after them makes
x <- x - aggregate(x - x_local) and x_local <- x. The common model is one flat copy. It is noted anew at the first step
after each synchronization, at the price of one pass over memory, so that a model loaded then is not mistaken for an
update.

A synchronization that fails leaves the common model on every rank. The common model has then moved by the means of the
reducers before the one that failed, which all ranks have.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from collectives.consistency.call_check import fingerprint
from mpicomp.torch.buckets import BucketReducer
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.states import require_counters, require_like


class LocalUpdates:
    """Counts local steps, and synchronizes after `local_steps` of them.

    Parameters
    ----------
    reducers, comm, masters
        What is averaged, between whom, and the float32 copies among it.
    local_steps
        H.
    skip_nonfinite
        Whether no rank makes a step if the gradients of one of them hold NaN or infinity: momentum would keep them.

    Attributes
    ----------
    steps
        Optimizer steps made since the last synchronization.
    """

    def __init__(
        self,
        reducers: tuple[BucketReducer, ...],
        comm: Communicator,
        masters: MasterWeights,
        local_steps: int,
        skip_nonfinite: bool,
    ) -> None:
        self.reducers = reducers
        self.synchronizations = self.steps = 0
        self._comm, self._masters = comm, masters
        self._local_steps, self._skip_nonfinite = local_steps, skip_nonfinite
        self._checked = self._skipping = self._warned = False
        self._common = [torch.zeros(reducer.bucket.n, dtype=reducer.bucket.dtype) for reducer in reducers]
        self._common_views = [reducer.bucket.views(flat) for reducer, flat in zip(reducers, self._common, strict=True)]

    @property
    def models_differ(self) -> bool:
        """Whether local steps were made since the last synchronization."""
        return self.steps > 0

    @torch.no_grad()
    def begin_step(self) -> None:
        """Note the common model if this is the first step after a synchronization."""
        self._checked = self._skipping = False
        if self.steps == 0:
            self._masters.refresh()
            for reducer, views in zip(self.reducers, self._common_views, strict=True):
                torch._foreach_copy_(views, reducer.parameters)

    def before_evaluation(self) -> None:
        """Show a closure where the optimizer has moved the masters since it was last called."""
        self._masters.publish()

    def take_gradients(self) -> None:
        """Hand the gradients, which are there now, to the masters; drop them all if the step is to be skipped."""
        self._masters.take_gradients()
        # Once a step: a closure may be called more often on one rank than on another.
        if self._skip_nonfinite and not self._checked:
            self._checked = True
            self._skipping = self._any_nonfinite()
            if self._skipping:
                self.drop_gradients(set_to_none=True)
                for reducer in self.reducers:
                    for parameter in reducer.parameters:
                        parameter.grad = None  # which optimizers pass over

    def end_step(self) -> None:
        """Count the step, unless it was skipped, and synchronize if it was the last local one."""
        if self._skipping:
            return
        self.steps += 1
        if self.steps >= self._local_steps:  # more, where a state saved with more local steps was loaded
            self.synchronize()
        else:
            self._masters.publish()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average what the ranks moved since the last synchronization; return at once if they made no step."""
        if self.steps == 0:
            return
        try:
            for reducer, common in zip(self.reducers, self._common, strict=True):
                torch._foreach_copy_(reducer.vector_views, reducer.parameters)
                torch.sub(common, reducer.vector, out=reducer.vector)
                reducer.aggregate()
                common.sub_(reducer.mean)
            self.synchronizations += 1
        finally:
            for reducer, common_views in zip(self.reducers, self._common_views, strict=True):
                torch._foreach_copy_(reducer.parameters, common_views)
            self._masters.publish()
            self.steps = 0

    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients that the optimizer cannot see, because it holds masters in their place."""
        self._masters.drop_gradients(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Counters, masters, and after local steps the common model."""
        return {
            "rounds": self.synchronizations,
            "steps": self.steps,
            "masters": [master.detach().clone() for master in self._masters.masters],
            "common": [flat.clone() for flat in self._common] if self.steps else [],
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can take `state`."""
        require_counters(state, "rounds", "steps")
        here = self._masters.masters, self._common if state["steps"] else []
        for key, expected in zip(("masters", "common"), here, strict=True):
            require_like(state, key, expected)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.synchronizations = state["rounds"]
        self.steps = state["steps"]
        for master, saved in zip(self._masters.masters, state["masters"], strict=True):
            master.copy_(saved)
        for flat, saved in zip(self._common, state["common"], strict=False):
            flat.copy_(saved)

    def _any_nonfinite(self) -> bool:
        """Whether a rank's gradients hold NaN or infinity; the same answer on all, and a warning at the first."""
        comm, text = self._comm, "the check of gradients before an optimizer step"
        comm.agree(fingerprint(text), lambda: text)
        gradients = [parameter.grad for reducer in self.reducers for parameter in reducer.parameters]
        flags = np.zeros(comm.size, np.int64)
        flags[comm.rank] = not all(gradient is None or _all_finite(gradient) for gradient in gradients)
        ranks = np.flatnonzero(comm.allreduce(flags))
        if ranks.size and not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {comm.rank} of {comm.size}: this step and others like it are skipped, as the gradients of "
                f"{len(ranks)} rank(s), the first of them rank {ranks[0]}, hold NaN or infinity",
                RuntimeWarning, stacklevel=4,
            )  # fmt: skip
        return bool(ranks.size)


def _all_finite(gradient: Tensor) -> bool:
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())
