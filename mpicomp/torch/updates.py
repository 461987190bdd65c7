"""Rounds in "updates" mode: each rank's optimizer moves its own copy of the model, then the ranks average the moves.

A round starts from the common model x, makes H optimizer steps to x_local and ends with x <- x - aggregate(x - x_local)
and x_local <- x. The common model is one flat copy; it is noted anew at the start of each round, at the price of one
pass over memory, so that a model loaded between rounds is not mistaken for an update.
"""

from __future__ import annotations

from typing import Any

import torch

from mpicomp.torch.lanes import Lane
from mpicomp.torch.masters import Masters


class UpdateRounds:
    """Counts the steps of a round and closes it after `local_steps`.

    Attributes
    ----------
    rounds
        Rounds closed so far.
    steps
        Optimizer steps made in the open round; 0 if none is open.
    """

    def __init__(self, lanes: tuple[Lane, ...], masters: Masters, local_steps: int) -> None:
        self.lanes = lanes
        self.rounds = 0
        self.steps = 0
        self._masters = masters
        self._local_steps = local_steps
        self._common = [torch.zeros(lane.bucket.n, dtype=lane.bucket.dtype) for lane in lanes]
        self._common_views = [lane.bucket.views(flat) for lane, flat in zip(lanes, self._common, strict=True)]

    @property
    def open(self) -> bool:
        """Whether local steps were made since the last round was closed."""
        return self.steps > 0

    @torch.no_grad()
    def before_step(self) -> None:
        """Note the common model if this step opens a round; hand the gradients, which are there now, to the masters."""
        if self.steps == 0:
            self._masters.refresh()
            for lane, views in zip(self.lanes, self._common_views, strict=True):
                torch._foreach_copy_(views, lane.parameters)
        self._masters.take_gradients()

    def after_step(self) -> None:
        """Count the step and close the round if it was the last."""
        self.steps += 1
        if self.steps == self._local_steps:
            self.close()
        else:
            self._masters.publish()

    @torch.no_grad()
    def close(self) -> None:
        """Average what the ranks moved since the round was opened; nothing to do if none is open."""
        if self.steps == 0:
            return
        for lane, common, common_views in zip(self.lanes, self._common, self._common_views, strict=True):
            torch._foreach_copy_(lane.vector_views, lane.parameters)
            torch.sub(common, lane.vector, out=lane.vector)
            lane.aggregate()
            common.sub_(lane.mean)
            torch._foreach_copy_(lane.parameters, common_views)
        self._masters.publish()
        self.steps = 0
        self.rounds += 1

    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients that the optimizer cannot see, because it holds masters in their place."""
        self._masters.drop_gradients(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Counters, masters, and in an open round the common model."""
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "masters": [master.detach().clone() for master in self._masters.masters],
            "common": [flat.clone() for flat in self._common] if self.steps else [],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.rounds = state["rounds"]
        self.steps = state["steps"]
        for master, saved in zip(self._masters.masters, state["masters"], strict=True):
            master.copy_(saved)
        for flat, saved in zip(self._common, state["common"], strict=False):
            flat.copy_(saved)
