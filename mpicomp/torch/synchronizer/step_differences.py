"""Descriptions of the ranks' optimizers and steps, and the messages about their differences."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import TypedDict

import numpy as np
from torch import Tensor

from collectives.quoting import list_ranks, shown
from mpicomp.torch.synchronizer.parameter_changes import ADDED, FROZEN, PLACES

_PLAIN = (float, bool, str, type(None))


class RankDescription(TypedDict):
    """A rank's part in a step, as ranks exchange it."""

    refusal: str
    drops: bool
    compared: dict[str, object]


def first_difference(ranks: Sequence[RankDescription], sampled: str) -> str:
    """Return the first difference between the ranks, and the cure."""
    for rank, of_rank in enumerate(ranks):
        if of_rank["refusal"]:
            return f"rank {rank} refuses the step: {of_rank['refusal']}"
    dropping = [rank for rank, of_rank in enumerate(ranks) if of_rank["drops"]]
    if dropping:
        others = [rank for rank in range(len(ranks)) if rank not in dropping]
        return (
            f"{list_ranks(dropping)} dropped the gradients of this step by zero_grad(), while {list_ranks(others)} "
            "made it: make the same decision on all ranks, for instance by comm.allreduce(bad) where bad is a bool of "
            "each rank"
        )
    compared = [of_rank["compared"] for of_rank in ranks]
    for key in dict.fromkeys(key for described in compared for key in described):
        values: dict[object, list[int]] = {}
        for rank, described in enumerate(compared):
            values.setdefault(described.get(key, "missing"), []).append(rank)
        if len(values) > 1:
            listed = ", ".join(f"{value} on {list_ranks(of_value)}" for value, of_value in values.items())
            return _WORDS.get(key.rstrip(" 0123456789"), _OPTION).format(key=key, listed=listed, sampled=sampled)
    return "the ranks' optimizers differ"


_OPTION = (
    "{key} is {listed}: give all ranks the same optimizer with the same options; a scheduler such as ReduceLROnPlateau "
    "takes the mean of the ranks' losses, comm.allreduce(loss, op='mean'), and is restored on all ranks or on none"
)
_WORDS = {
    "'rate_sum' of parameter group": (
        "{key} is {listed}, the sum of the learning rates since the last synchronization: call step() and "
        "synchronize() in the same order on all ranks, with the same learning rates"
    ),
    ADDED: (
        "{key} is {listed}: before a step, add and unfreeze the same parameters on all ranks, in the same order, with "
        "the same names, shapes and algorithms"
    ),
    FROZEN: "{key} is {listed}: before a step, freeze the same parameters on all ranks",
    PLACES: "the {key} differs ({listed}): let all ranks have the same parameters in each group",
    "loss": (
        "the closure's loss is {listed}, and the optimizer decides by it: return the mean of the ranks' losses from "
        "the closure, comm.allreduce(loss, op='mean')"
    ),
    "evaluation": (
        "the optimizer has called its closure {listed} times in this step: it must do so equally often on all ranks, "
        "so return the mean of the ranks' losses from the closure, comm.allreduce(loss, op='mean')"
    ),
    "sample": (
        "the models differ between the ranks, in parameter {sampled!r}: load or change the model in the same way on "
        "all ranks, or make it equal by broadcast_parameters(model, comm)"
    ),
}


def can_change(value: object) -> bool:
    """Return True if an option, or one of several, may get another value and stay the same object."""
    value = tuple(value.values()) if isinstance(value, dict) else value
    return any(map(can_change, value)) if isinstance(value, tuple) else isinstance(value, list | np.ndarray | Tensor)


def plain_option(value: object) -> object:
    """Return an option as a number, text or None whose representation is equal where the option is."""
    if type(value) in _PLAIN:
        return value
    return float(value) if type(value) is int else option_text(value)


def option_text(value: object) -> str:
    """Return an option as ranks compare it, without parts that differ between processes."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.device.type == "cpu":
            return repr(float(value))
        return f"a tensor on {value.device}, version {value._version}"  # to read it the host would wait
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, Real) and not isinstance(value, bool):
        return repr(float(value))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(option_text, value))})"
    if isinstance(value, str | bool | None):
        return shown(value)
    return f"of type {type(value).__name__}"
