"""States of optimizers for another number of ranks than they were taken on. A pure function, without MPI.

Entries that all ranks share stay as they are. Residuals follow `mpicomp.redistribute`: the pending part is the mean of
the ranks' residuals, and each new rank starts from it.

The wrapped optimizer's tensors are equal on all ranks under "gradients". Under "updates" they differ, since each rank's
optimizer runs on its own gradients, and new ranks start from their *mean* over the old ones. The move that momentum
still holds is then the same on average over the ranks, as it is linear in momentum. Adam's moments are running means of
gradients and of their squares, and the mean over ranks is the running mean over all ranks' gradients. State that is not
known to be linear, such as codes with a scale, is refused (`mpicomp.torch.state.linear_states`). Counters, such as
Adam's ``step``, have no mean: they must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.quoting import one_line, shown
from mpicomp.feedback.base import StateKind
from mpicomp.state.redistribute import CURE, redistribute, require_same_keys
from mpicomp.torch.state.linear_states import COUNTER, LinearEntries, shape_of_parameter
from mpicomp.torch.state.schema import OWN_MOMENTA, RANK, STATE_KEY, State, with_arrays, with_tensors, wrapped_part

_KINDS = frozenset(get_args(StateKind))


def redistribute_states(states: Sequence[State], ranks: int) -> list[State]:
    """Return the optimizer states that each of `ranks` ranks goes on from, where others were before.

    The model is the same on all ranks. Load it, and one of these states, on each rank. The topology may be another one
    too; with as many ranks as before, and the same topology, load each rank's own state, which goes on to the bit.

    Parameters
    ----------
    states : sequence of dict
        States of `DistributedOptimizer`, `OneBitAdam` or the state of `ddp_hook`, by ``state_dict`` on all ranks that
        there were, in any order, after the same step. They are only read, tensor by tensor: states of
        ``torch.load(path, mmap=True)`` take no memory of their own.
    ranks : int
        Number of ranks that there are now.

    Returns
    -------
    list of dict
        In rank order. They share their tensors, and those that were equal on all ranks with ``states``;
        ``load_state_dict`` makes copies.

    Raises
    ------
    ValueError
        A rank's state is missing or there twice; the states are of different models, modes or steps, or were taken in
        the middle of local steps, when the ranks' models differ; or counters of the wrapped optimizer differ, or state
        of it that is not known to be linear in gradients or their squares.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import DistributedOptimizer, redistribute_states
    >>> def make_optimizer(comm):
    ...     model = torch.nn.Linear(3, 1, bias=False)
    ...     torch.nn.init.ones_(model.weight)
    ...     sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    ...     return model, DistributedOptimizer(sgd, mpicomp.LocalTopK(rate=3), comm, model.named_parameters())
    >>> def save(comm):
    ...     model, optimizer = make_optimizer(comm)
    ...     model(torch.tensor([[3.0, 1.0, comm.rank]])).sum().backward()
    ...     optimizer.step()
    ...     return optimizer.state_dict()
    >>> states = redistribute_states(mpicomp.run_local(3, save), ranks=2)
    >>> def resume(comm):
    ...     model, optimizer = make_optimizer(comm)
    ...     optimizer.load_state_dict(states[comm.rank])
    ...     return optimizer.aggregators[0].residual[:3].tolist()  # the mean of the three ranks' residuals
    >>> mpicomp.run_local(2, resume)[0]
    [0.0, 1.0, 1.0]
    """
    if ranks < 1 or not states:
        raise ValueError(f"states go from 1 rank or more to 1 or more, not from {len(states)} to {ranks}")
    ordered = _by_rank(states)
    owns = [RANK.own_part(state) for state in ordered]
    for rank, own in enumerate(owns):
        _check(own, rank)
    require_same_keys("their states", owns)
    own = {
        key: (_merge_momenta if key == OWN_MOMENTA else merge)(key, [one[key] for one in owns])
        for key in owns[0]
        if key not in RANK.entries
    }
    own["aggregators"] = [_merge_bucket(owns, bucket) for bucket in range(len(own["kinds"]))]
    parts = [wrapped_part(state) for state in ordered]
    require_same_keys("their states", parts)
    averages = {"state": partial(_merge_parameters, shapes=own.get("shapes"))} if own.get("mode") == "updates" else {}
    wrapped = {key: averages.get(key, merge)(key, [part[key] for part in parts]) for key in parts[0]}
    return [{**wrapped, STATE_KEY: {**own, "rank": rank, "ranks": ranks}} for rank in range(ranks)]


def _by_rank(states: Sequence[State]) -> list[State]:
    """Return the states in rank order; raise ValueError unless they are those of all ranks of one job."""
    found: dict[int, State] = {}
    total: int | None = None
    for place, state in enumerate(states):
        try:
            own = RANK.own_part(state)
        except ValueError as error:
            raise ValueError(f"states[{place}]: {error}") from error
        rank, of = own["rank"], own["ranks"]
        total = of if total is None else total
        if of != total or not 0 <= rank < of:
            raise ValueError(
                f"states[{place}] is of rank {shown(rank)} of {shown(of)}, and states[0] of one of {shown(total)} "
                f"ranks: {CURE}"
            )
        if rank in found:
            raise ValueError(f"two of the states are of rank {rank}: pass one of each rank")
        found[rank] = state
    missing = [str(rank) for rank in range(min(total or 0, len(states) + 10)) if rank not in found]
    if missing:
        raise ValueError(
            f"of the {shown(total)} ranks' states those of {', '.join(missing[:10])} are missing: pass those of all"
        )
    return [found[rank] for rank in sorted(found)]


def _check(own: State, rank: int) -> None:
    """Raise ValueError unless a rank's own part has kinds, and was saved between two synchronizations."""
    kinds = own.get("kinds")
    if not isinstance(kinds, list) or len(kinds) != len(own["aggregators"]):
        raise ValueError(f"rank {rank}'s state lacks the kinds of its residuals; save it again")
    if not all(isinstance(one, dict) and _KINDS.issuperset(map(str, one.values())) for one in kinds):
        raise ValueError(f"rank {rank}'s state is damaged (its kinds are {shown(kinds)}); take an earlier one")
    rounds = own.get("rounds")
    if isinstance(rounds, dict) and rounds.get("steps"):
        raise ValueError(
            f"rank {rank}'s state was saved in the middle of local steps ({shown(rounds['steps'])} after the last "
            "synchronization), when the ranks' models differ: save after optimizer.synchronize()"
        )


def _merge_bucket(owns: Sequence[State], bucket: int) -> State:
    """Return the state of one bucket's aggregator, for any rank."""
    try:
        states = [with_arrays(own["aggregators"][bucket]) for own in owns]
        if not all(isinstance(state, dict) for state in states):
            raise ValueError("a rank's state of it is damaged; take an earlier one")
        return with_tensors(redistribute(states, 1, owns[0]["kinds"][bucket])[0])
    except ValueError as error:
        raise ValueError(f"bucket {bucket}: {error}") from error


def _merge_parameters(where: str, states: Sequence[Any], shapes: object) -> Any:
    """Return the wrapped optimizer's states by parameter, with means of the entries that are linear."""
    if not all(isinstance(state, dict) for state in states):
        return merge(where, states)
    require_same_keys(where, states)
    merged = {}
    for index, first in states[0].items():
        entries = LinearEntries(shape_of_parameter(shapes, index, first))
        merged[index] = merge(f"{where}[{index!r}]", [state[index] for state in states], entries)
        entries.check()
    return merged


def merge(where: str, values: Sequence[Any], means: LinearEntries | None = None, entry: object = None) -> Any:
    """Return the common value of all ranks; ValueError, which names the place, if values differ and have no mean.

    Values of an `entry` that is among the `means` have their mean, and others are noted there.
    """
    first = values[0]
    if all(isinstance(value, dict) for value in values):
        require_same_keys(one_line(where), values)
        return {
            key: merge(f"{where}[{key!r}]", [value[key] for value in values], None if key == COUNTER else means, key)
            for key in first
        }
    if isinstance(first, list | tuple) and all(type(one) is type(first) and len(one) == len(first) for one in values):
        parts = enumerate(zip(*values, strict=True))
        return type(first)(merge(f"{where}[{i}]", part, means, entry) for i, part in parts)
    differing = next((rank for rank, value in enumerate(values) if not _same(value, first)), None)
    if differing is None:
        return first
    unlike = next((rank for rank, value in enumerate(values) if _form(value) != _form(first)), None)
    rank = differing if unlike is None else unlike
    if means is None or (unlike is not None and isinstance(first, Tensor) and isinstance(values[rank], Tensor)):
        raise ValueError(f"ranks 0 and {rank} differ in {_described(where, first, values[rank])}: {CURE}")
    if unlike is None and all(means.contain(entry, value) for value in values):
        return sum(values) / len(values) if isinstance(first, float) else _mean(values)
    means.refused.append(_described(where, first, values[rank]))
    return first


def _merge_momenta(where: str, values: Sequence[Any]) -> Any:
    """Return the mean over ranks of momenta by name, in which the next steps are linear."""
    require_same_keys(where, values)
    shapes = {name: LinearEntries([*one.shape]) for name, one in values[0].items()}
    return {name: merge(where, [one[name] for one in values], shapes[name], "momentum_buffer") for name in shapes}


def _described(where: str, first: object, other: object) -> str:
    return f"{one_line(where)} ({_shown(first)} and {_shown(other)})"


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean, taken in float64 and rounded once."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor.detach()
    return total.div_(len(tensors)).to(tensors[0].dtype)


def _form(value: object) -> tuple[object, ...]:
    """Return the type of a value, and a tensor's shape, dtype and layout."""
    return (type(value), value.shape, value.dtype, value.layout) if isinstance(value, Tensor) else (type(value),)


def _same(one: Any, other: Any) -> bool:
    """Return True if two leaves of states are equal; NaN is equal to NaN."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if not torch.is_tensor(one):
        return bool(one == other) or bool(one != one and other != other)
    if _form(one) != _form(other):
        return False
    try:
        if one.layout != torch.strided:
            return torch.equal(one, other)
        return torch.equal(tensor_bytes(one), tensor_bytes(other))
    except (RuntimeError, TypeError):  # of a layout or a subclass that lacks such operations
        return False


def _shown(value: object) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"{value.dtype}{list(value.shape)}"
    return shown(value)
