"""Copies of one rank's optimizer state on all ranks, such as momentum that only the rank that resumed has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives import Communicator
from collectives.compiling import keep_uncompiled
from collectives.consistency.call_check import fingerprint
from collectives.quoting import one_line
from mpicomp.torch.optimizer.distributed_optimizer import DistributedOptimizer
from mpicomp.torch.optimizer.one_bit_adam import OneBitAdam
from mpicomp.torch.replication import broadcast_tensors, require_same_layout
from mpicomp.torch.state.schema import State

_CALL = "broadcast_optimizer_state"


@keep_uncompiled
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, comm: Communicator | None = None, root: int = 0
) -> None:
    """Copy one rank's optimizer state and options to all ranks, as after resuming on one rank alone.

    The state of the others may be empty or another; learning rates and other options of parameter groups are copied
    too. All ranks then load it by ``optimizer.load_state_dict``. The values of parameters are left alone: see
    :func:`broadcast_parameters`.

    Parameters
    ----------
    optimizer
        A plain torch optimizer over the same parameters on all ranks. Its state is **replaced** on all ranks but
        `root`. Tensors are copied as they are; everything else is pickled.
    comm
        Communicator; None makes one on all ranks of the job and closes it again.
    root
        Rank whose state all take.

    Raises
    ------
    TypeError
        The optimizer is a DistributedOptimizer or OneBitAdam, whose ranks have residuals of their own, or part of
        `root`'s state cannot be pickled; where that is so on one rank, the others raise CollectiveMismatch.
    ValueError
        A tensor of the state is sparse or cannot be reached, or this rank's optimizer does not take the state; the
        others then raise CollectiveMismatch, and all have the state of before. There is no rank `root`.
    CollectiveMismatch
        The ranks' parameters differ in group, shape or dtype.
    """
    with Communicator() if comm is None else nullcontext(comm) as used:
        if isinstance(optimizer, DistributedOptimizer | OneBitAdam):
            message = (
                f"{used.here}, {_CALL}: every rank of {type(optimizer).__name__} has residuals of its own; save its "
                "state_dict() on every rank and give each its own back by load_state_dict(), or broadcast the state of "
                "the plain optimizer before wrapping it"
            )
            used.reject(TypeError(message), _CALL)
        _broadcast(optimizer, used, root)


def _broadcast(optimizer: torch.optim.Optimizer, comm: Communicator, root: int) -> None:
    parameters = {
        f"group {g}, parameter {i}": parameter
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    }
    require_same_layout(parameters, comm)
    before = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}

    def take(name: str, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors[name] = leaf
        return _Place(name, leaf.shape, leaf.dtype)

    state = comm.broadcast_object(_mapped(before, take) if comm.rank == root else None, root)

    def fill(name: str, leaf: object) -> object:
        if not isinstance(leaf, _Place):
            return leaf
        if comm.rank != root:
            tensors[name] = torch.empty(leaf.shape, dtype=leaf.dtype)
        return tensors[name]

    state = _mapped(state, fill)
    broadcast_tensors(tensors, comm, root, _CALL)
    try:
        _load(optimizer, state, comm)
    except BaseException:
        optimizer.load_state_dict(before)
        raise


def _load(optimizer: torch.optim.Optimizer, state: State, comm: Communicator) -> None:
    """Load a state; raise an error on every rank if one rank's optimizer cannot."""
    try:
        optimizer.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - of any optimizer: torch checks little, and others have their own rules
        message = f"{type(optimizer).__name__} does not take the state ({type(error).__name__}: {one_line(error)})"
        comm.reject(ValueError(f"{comm.here}, {_CALL}: {message}; build it with the same options on all ranks"), _CALL)
    comm.agree(fingerprint(_CALL), lambda: _CALL)


@dataclass(frozen=True)
class _Place:
    """Stand-in for a tensor that travels separately."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def _mapped(value: Any, change: Callable[[str, object], object], name: str = "state") -> Any:
    """Return the same dicts, lists and tuples with other leaves; each has a name of its own, for messages."""
    if type(value) is dict:
        return {key: _mapped(one, change, f"{name}[{key!r}]") for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, change, f"{name}[{i}]") for i, one in enumerate(value))
    return change(name, value)
