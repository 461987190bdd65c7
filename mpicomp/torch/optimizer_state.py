"""Equal states of plain torch optimizers on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import KeyPath, keystr, tree_map, tree_map_with_path

from collectives import Communicator
from collectives.consistency.descriptions import fingerprint
from collectives.quoting import one_line
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.devices import require_reachable
from mpicomp.torch.front_ends import require_torch_optimizer
from mpicomp.torch.named_tensors import checked_tensors
from mpicomp.torch.non_copyable import NonCopyable
from mpicomp.torch.replication import broadcast_tensors, require_same_layout
from mpicomp.torch.state.schema import State

_BROADCAST_STATE = "broadcast_optimizer_state"


@in_own_mode
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, comm: Communicator | None = None, root: int = 0
) -> None:
    """Copy one rank's optimizer state and options to all ranks, as after resuming on one rank alone.

    The state of the others may be empty or another; learning rates and other options of parameter groups are copied
    too. All ranks then load it by ``optimizer.load_state_dict``. The values of parameters are left alone: see
    :func:`broadcast_parameters`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        A plain torch optimizer over the same parameters on all ranks. Its state is **replaced** on all ranks but
        `root`. Tensors are copied as they are; everything else is pickled.
    comm : Communicator, optional
        None makes one on all ranks of the job and closes it again.
    root : int
        Rank whose state all take.

    Raises
    ------
    TypeError
        The optimizer is no torch optimizer, or a DistributedOptimizer or OneBitAdam, whose ranks have residuals of
        their own, or part of `root`'s state cannot be pickled; the others then raise CollectiveMismatch.
    ValueError
        A parameter or a tensor of the state has no shape yet or cannot be reached, or one of the state is sparse, or
        this rank's optimizer does not take the state; the others then raise CollectiveMismatch, and all have the state
        of before. There is no rank `root`.
    CollectiveMismatch
        The ranks' parameters differ in group, shape or dtype.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import broadcast_optimizer_state
    >>> def resume(comm):
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if comm.rank == 0 else 0.5, momentum=0.9)
    ...     broadcast_optimizer_state(optimizer, comm)
    ...     return optimizer.param_groups[0]["lr"]
    >>> mpicomp.run_local(2, resume)
    [0.1, 0.1]
    """
    with Communicator() if comm is None else nullcontext(comm) as used:
        with used.refusing(_BROADCAST_STATE, TypeError, ValueError):
            if isinstance(optimizer, NonCopyable):
                raise TypeError(
                    f"every rank of {type(optimizer).__name__} has residuals of its own; save its state_dict() on "
                    "every rank and give each its own back by load_state_dict(), or broadcast the state of the plain "
                    "optimizer before wrapping it"
                )
            require_torch_optimizer(optimizer)
            parameters = {
                f"group {g}, parameter {i}": parameter
                for g, group in enumerate(optimizer.param_groups)
                for i, parameter in enumerate(group["params"])
            }
            for name, parameter in parameters.items():
                require_reachable(name, parameter)
        require_same_layout(parameters, used)
        _broadcast_state(optimizer, used, root)


def _broadcast_state(optimizer: torch.optim.Optimizer, comm: Communicator, root: int) -> None:
    before = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}

    def take(path: KeyPath, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        name = f"state{keystr(path)}"
        tensors[name] = leaf
        return _TensorPlace(name, leaf.shape, leaf.dtype)

    state = comm.broadcast_object(
        tree_map_with_path(take, before, is_leaf=_is_whole) if comm.rank == root else None, root
    )

    def fill(leaf: object) -> object:
        if not isinstance(leaf, _TensorPlace):
            return leaf
        if comm.rank != root:
            tensors[leaf.name] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        return tensors[leaf.name]

    state = tree_map(fill, state, is_leaf=_is_whole)
    usage = "broadcast_optimizer_state(optimizer, comm, root=0)"
    broadcast_tensors(checked_tensors(tensors, comm, _BROADCAST_STATE, usage), comm, root)
    try:
        _load_state(optimizer, state, comm)
    except BaseException:
        optimizer.load_state_dict(before)
        raise


def _is_whole(one: object) -> bool:
    """Return True for a value that travels whole: other containers may be registered on one rank alone."""
    return type(one) not in (dict, list, tuple)


def _load_state(optimizer: torch.optim.Optimizer, state: State, comm: Communicator) -> None:
    """Load a state; raise an error on every rank if one rank's optimizer cannot."""
    try:
        optimizer.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - of any optimizer: torch checks little, and others have their own rules
        problem = (
            f"{comm.here}, {_BROADCAST_STATE}: {type(optimizer).__name__} does not take the state "
            f"({type(error).__name__}: {one_line(error)}); build it with the same options on all ranks"
        )
        comm.reject(ValueError(problem), _BROADCAST_STATE)
    comm.agree(fingerprint(_BROADCAST_STATE), lambda: _BROADCAST_STATE)


@dataclass(frozen=True)
class _TensorPlace:
    """Stand-in for a tensor that travels separately."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
