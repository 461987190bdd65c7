"""States of a training run for another number of ranks than saved them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apps.train.meter import Meter
from collectives.quoting import shown
from mpicomp.torch import redistribute_states

State = dict[str, Any]

_SHARED = ("epoch", "step", "images", "loss_images", "best_accuracy")


def redistribute(states: Sequence[State], ranks: int) -> list[State]:
    """Return the states that each of `ranks` ranks goes on from, where others were before.

    Optimizers go on as in `mpicomp.torch.redistribute_states`. Losses and buffers, such as running means, become
    their means over the ranks. Every rank draws new random numbers.

    Parameters
    ----------
    states : sequence of dict
        What ``Training.state_dict`` returned on all ranks that there were, after the same step, or what this function
        returned; only read.
    ranks : int
        Number of ranks that there are now.

    Returns
    -------
    list of dict
        In rank order; they share their tensors.

    Raises
    ------
    ValueError
        The states do not belong together.
    """
    for rank, state in enumerate(states):
        for key in _SHARED:
            if state[key] != states[0][key]:
                raise ValueError(
                    f"ranks 0 and {rank} differ in {key} ({shown(states[0][key])} and {shown(state[key])}): they are "
                    "of different runs or steps"
                )
    merged = {
        **{key: states[0][key] for key in _SHARED},
        "loss_sum": _mean([state["loss_sum"] for state in states]),
        "buffers": {name: _mean([state["buffers"][name] for state in states]) for name in states[0]["buffers"]},
        "meter": Meter.merge([state["meter"] for state in states]),
        "torch_random": None,
    }
    optimizers = redistribute_states([state["optimizer"] for state in states], ranks)
    return [{**merged, "optimizer": optimizer} for optimizer in optimizers]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of floats, taken in float64 and rounded once; the first of integers, which count."""
    first = tensors[0]
    if not first.is_floating_point():
        return first
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(first.dtype)
