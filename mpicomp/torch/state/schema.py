"""Parts of a state, which a file may have held: checked before any of them is taken over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from collectives.json_file import fields
from collectives.quoting import one_line, shown
from mpicomp.torch.buckets import NamedParameter

if TYPE_CHECKING:  # states are converted without MPI
    from collectives import Communicator
    from mpicomp.aggregator.base import Aggregator

STATE_KEY = "mpicomp"
"""Of what a DistributedOptimizer's state has beside the wrapped optimizer's own."""

State: TypeAlias = dict[str, Any]

_MOST = 2**63 - 1


def rank_part(comm: Communicator, aggregators: Sequence[Aggregator]) -> dict[str, Any]:
    """What every rank's state has under "mpicomp": whose it is, the aggregators' states, and their kinds."""
    return {
        "rank": comm.rank,
        "ranks": comm.size,
        "aggregators": [with_tensors(aggregator.state_dict()) for aggregator in aggregators],
        "kinds": [aggregator.state_kinds for aggregator in aggregators],
    }


def own_part(state_dict: Any, **types: type) -> dict[str, Any]:
    """Return a state's entries under "mpicomp", with those of all ranks' states, and with others of these `types`.

    Raises
    ------
    ValueError
        There are none, or other ones.
    """
    if not isinstance(state_dict, dict):
        raise ValueError(f"the state is {shown(state_dict)}, not a dict; load what state_dict returned")
    if state_dict.get(STATE_KEY) is None:
        raise ValueError(
            "this is a plain optimizer's state, without residuals; load it into .optimizer, the wrapped optimizer"
        )
    return entries(state_dict[STATE_KEY], rank=int, ranks=int, aggregators=list, **types)


def entries(state: Any, **types: type) -> dict[str, Any]:
    """Return a part of a state; raise ValueError unless it has entries of these types."""
    try:
        return fields(state, **types)
    except ValueError as error:
        raise ValueError(f"the state under {STATE_KEY!r} is damaged ({error}); load an earlier one") from error


def wrapped_part(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state's entries that are the wrapped optimizer's own."""
    return {key: value for key, value in state_dict.items() if key != STATE_KEY}


def require_counters(state: dict[str, Any], *names: str) -> None:
    """Raise ValueError unless these entries of a state are integers of 0 or more."""
    for name in names:
        value = entries(state, **{name: int})[name]
        if not 0 <= value <= _MOST:
            raise ValueError(
                f"the state's {name} is {shown(value)}, not an integer from 0 to 2^63 - 1; load an earlier one"
            )


def require_rank(state: dict[str, Any], comm: Communicator) -> None:
    """Raise ValueError unless a state, which has its rank and how many there were, is this rank's."""
    if (state["rank"], state["ranks"]) != (comm.rank, comm.size):
        raise ValueError(
            f"the state is that of rank {shown(state['rank'])} of {shown(state['ranks'])}; every rank loads its own, "
            "and mpicomp.torch.redistribute_states makes those for another number of ranks"
        )


def require_aggregators(state: dict[str, Any], aggregators: Sequence[Aggregator]) -> None:
    """Raise ValueError unless these can load the states that a state has of its aggregators."""
    if len(state["aggregators"]) != len(aggregators):
        raise ValueError("the state has another number of buckets than of aggregators; load an earlier one")
    for aggregator, one in zip(aggregators, state["aggregators"], strict=True):
        aggregator.check_state_dict(with_arrays(one))


def load_aggregators(state: dict[str, Any], aggregators: Sequence[Aggregator]) -> None:
    """Load what `require_aggregators` has found fit."""
    for aggregator, one in zip(aggregators, state["aggregators"], strict=True):
        aggregator.load_state_dict(with_arrays(one))


def require_like(state: dict[str, Any], name: str, expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless an entry of a state is tensors by names, with the shapes of those that are expected."""
    found = entries(state, **{name: dict})[name]
    if not all(torch.is_tensor(one) and one.is_floating_point() and not one.is_sparse for one in found.values()):
        raise ValueError(f"the state's {name} is {shown(found)}, not tensors of numbers by name")
    shapes, wanted = ({key: tuple(one.shape) for key, one in tensors.items()} for tensors in (found, expected))
    if shapes != wanted:
        differing = sorted(key for key in {**shapes, **wanted} if shapes.get(key) != wanted.get(key))
        raise ValueError(
            f"the state's {name} differs in {shown(differing)}: it has shapes {shown(shapes)}, here they would be "
            f"{shown(wanted)}; build the optimizer with the same options and model"
        )


def members_by_name(
    names: Sequence[Sequence[str]], members: Sequence[NamedParameter], here: str
) -> list[list[NamedParameter]]:
    """The members of the buckets that a state was saved with.

    Parameters
    ----------
    names
        Of each bucket's members, as the state has them.
    members
        All that there are here.
    here : str
        What has these members, in words.

    Raises
    ------
    ValueError
        The buckets have other members than there are here; names them.
    """
    if not all(isinstance(one, list) and one and all(isinstance(name, str) for name in one) for one in names):
        raise ValueError(f"the state's buckets are {shown(names)}, not lists of names; load an earlier one")
    by_name = {member.name: member for member in members}
    saved = [name for bucket in names for name in bucket]
    problems = [
        f"{which} has {_some(more)}, which {other} lacks"
        for which, more, other in (
            ("the state", set(saved) - set(by_name), here),
            (here, set(by_name) - set(saved), "the state"),
        )
        if more and saved
    ]
    if problems:
        raise ValueError(f"{'; '.join(problems)}; build it from the same model with the same names")
    if len(saved) > len(set(saved)):
        raise ValueError("the state has a parameter twice; load an earlier one")
    return [[by_name[name] for name in bucket] for bucket in names]


def with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return an aggregator's state with tensors for arrays, as ``torch.load`` reads it under ``weights_only=True``."""
    return {key: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for key, one in state.items()}


def with_arrays(state: Any) -> Any:
    """Return an aggregator's state with arrays for tensors; what is no state is left as it is.

    The arrays have the tensors' memory, if that is the host's.

    Raises
    ------
    ValueError
        A tensor is not one of those that NumPy has.
    """
    if not isinstance(state, dict):
        return state
    try:
        return {key: one.detach().cpu().numpy() if torch.is_tensor(one) else one for key, one in state.items()}
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"a tensor of the state cannot be taken ({one_line(error)}); load an earlier state") from error


def _some(names: Collection[str]) -> str:
    """The first few of the names."""
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
