"""States of aggregators for other ranks than those that they were taken on.

The sums stay right in the following way. A residual is the part that a rank has yet to contribute to a *mean*, so the
part that is pending is the mean of the residuals, and each new rank starts from it. Errors that owners of elements keep
stay with the elements: every new rank gets all of them, and takes those of the elements that it owns. Counters and
scales are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.annotations import AnyArray
from collectives.quoting import listed, one_line, shown

if TYPE_CHECKING:
    from mpicomp.feedback.base import StateKind

State = dict[str, Any]
Range = tuple[int, ...]
StandIn = Callable[[State, range], State]
CURE = "take states of one run, saved after the same step"


def redistribute(states: Sequence[State], ranks: int, kinds: Mapping[str, StateKind]) -> list[State]:
    """Return the states that each of `ranks` ranks goes on from, where others were before.

    The topology may be another one, too, also with as many ranks as before.

    Parameters
    ----------
    states : sequence of dict
        Of all ranks that there were, in rank order, taken after the same step.
    ranks : int
        Number of ranks that there are now.
    kinds : dict
        ``aggregator.state_kinds``: whether a key is the ranks' "mean" (taken in float64, rounded once), the "owner"'s
        part of a vector, "shared", the "owned" range of elements, or the bounds of the "shard" of a `PerNode`.

    Returns
    -------
    list of dict
        In rank order; they share their arrays.

    Raises
    ------
    ValueError
        The states do not belong together, or not to an aggregator of these `kinds`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def train(comm):
    ...     top_k = mpicomp.LocalTopK(rate=2).start(comm, 2)
    ...     top_k.aggregate(np.array([4.0, comm.rank], np.float32))
    ...     return top_k.state_dict(), top_k.state_kinds
    >>> states, kinds = zip(*mpicomp.run_local(4, train))
    >>> def resume(comm):
    ...     top_k = mpicomp.LocalTopK(rate=2).start(comm, 2)
    ...     top_k.load_state_dict(mpicomp.redistribute(states, comm.size, kinds[0])[comm.rank])
    ...     return top_k.residual.tolist()  # the mean of the four ranks' residuals
    >>> mpicomp.run_local(2, resume)
    [[0.0, 1.5], [0.0, 1.5]]
    """
    if ranks < 1 or not states:
        raise ValueError(f"a state goes from 1 rank or more to 1 or more, not from {len(states)} to {ranks}")
    unknown = set(states[0]) - set(kinds)
    if unknown:
        raise ValueError(f"the kinds lack {listed(unknown)}: pass the state_kinds of the states' aggregator")
    shard = next((key for key, kind in kinds.items() if kind == "shard"), None)
    if shard is None:
        merged = _merge_dicts("their states", states, kinds, _find_owned(states, kinds))
    else:
        merged = _merge_shards(states, kinds, shard)
    # an empty range: the state holds the elements of all owners; states of earlier versions do not have the key
    merged |= {key: np.zeros(0, np.int64) for key, kind in kinds.items() if kind == "owned"}
    return [dict(merged) for _ in range(ranks)]


def among_survivors(
    states: Sequence[State], kinds: Mapping[str, StateKind], stand_in: StandIn | None, of_dead: Sequence[State] = ()
) -> State:
    """Return the state from which each survivor goes on, of the states of all survivors, after the same step.

    Like `redistribute`, but elements that only dead ranks owned have no pending error.

    Parameters
    ----------
    states, kinds
        As in `redistribute`.
    stand_in : callable or None
        Called as ``stand_in(state, elements)`` with a survivor's state, for each shard whose owners have all died;
        returns a state of this shard without pending errors. With the state of an empty shard, where no survivor has
        another one, it returns this rank's state of its new shard.
    of_dead : sequence of dict
        Copies of dead ranks' states, of which only the errors of elements that they owned are taken.

    Returns
    -------
    dict
    """
    shard = next((key for key, kind in kinds.items() if kind == "shard"), None)
    n = int(states[0]["n"])
    if shard is None:
        return redistribute(_with_owners(states, kinds, n, of_dead), 1, kinds)[0]
    groups: dict[Range, list[State]] = {}
    for state in states:
        groups.setdefault(tuple(np.asarray(state[shard]).tolist()), []).append(state)
    full = sorted(bounds for bounds in groups if bounds[0] < bounds[-1])
    everyones = [one for bounds in full for one in _with_owners(groups[bounds], kinds, bounds[-1] - bounds[0])]
    assert stand_in is not None
    if not full and n:
        return stand_in(states[0], range(n))
    everyones += [stand_in(everyones[0], range(*gap)) for gap in _gaps([(one[0], one[-1]) for one in full], n)]
    return redistribute(everyones or states, 1, kinds)[0]


def _with_owners(
    states: Sequence[State], kinds: Mapping[str, StateKind], n: int, of_dead: Sequence[State] = ()
) -> list[State]:
    """Return the states, the copies of dead ranks', and one without errors for each range that nobody owns."""
    owned = next((key for key, kind in kinds.items() if kind == "owned" and key in states[0]), None)
    if owned is None:
        return [*states]
    ranges = [tuple(np.asarray(state[owned]).tolist()) for state in (*states, *of_dead)]
    if not any(ranges):  # each state has the elements of all owners
        return [*states]
    # a mean over more states than there are survivors must stay that of the survivors
    of_mean = [key for key in states[0] if kinds[key] == "mean"]
    means = {key: _merge(key, [state[key] for state in states], "mean", None) for key in of_mean}
    nobody = {key: np.zeros_like(value) if kinds[key] == "owner" else value for key, value in states[0].items()} | means
    gaps = _gaps([(start, stop) for start, stop in filter(None, ranges)], n)
    dead = [{**nobody, **{key: one for key, one in state.items() if key not in means}} for state in of_dead]
    return [*states, *dead, *({**nobody, owned: np.array(gap, np.int64)} for gap in gaps)]


def _gaps(ranges: Sequence[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    """Return the parts of `n` elements that lie in no range."""
    full = sorted(one for one in ranges if one[0] < one[1])
    starts, stops = [0, *(stop for _, stop in full)], [*(start for start, _ in full), n]
    return [gap for gap in zip(starts, stops, strict=True) if gap[0] < gap[1]]


def _merge_shards(states: Sequence[State], kinds: Mapping[str, StateKind], key: str) -> State:
    """Return the state of all shards, of states in which several ranks have each shard.

    Entries with a number for each element are joined. Others become dicts, by the number of the shard.
    """
    groups: dict[Range, list[State]] = {}
    for rank, state in enumerate(states):
        found = np.asarray(state.get(key))
        if found.dtype.kind not in "iu" or found.ndim != 1 or found.size < 2:
            raise ValueError(f"rank {rank} has {key} {_shown(state.get(key))}, not bounds of shards: {CURE}")
        groups.setdefault(tuple(found.tolist()), []).append(state)
    n = int(states[0]["n"])
    full = sorted(bounds for bounds in groups if bounds[0] < bounds[-1] or not n)
    joined = [bounds[0] for bounds in full] == [0, *(bounds[-1] for bounds in full[:-1])]
    if not full or not joined or full[-1][-1] != n:
        raise ValueError(
            f"the shards of the states do not make up their {n} elements: take the states of all ranks, after the same "
            "step"
        )
    inner = {name: kind for name, kind in kinds.items() if name != key}
    by_shard = []
    for bounds in full:
        group = [{name: one for name, one in state.items() if name != key} for state in groups[bounds]]
        by_shard.append(
            _merge_dicts(
                f"the states of elements {bounds[0]} to {bounds[-1] - 1}", group, inner, _find_owned(group, inner)
            )
        )
    require_same_keys("their shards", by_shard)
    whole: State = {key: np.array([full[0][0], *(bound for bounds in full for bound in bounds[1:])], np.int64)}
    for name, first in by_shard[0].items():
        values = [one[name] for one in by_shard]
        lengths = [bounds[-1] - bounds[0] for bounds in full]
        if name in ("method", "n", "step"):
            whole[name] = _merge(name, values, "shared", None)
        elif len(full) == 1:
            whole[name] = first
        elif [getattr(one, "shape", None) for one in values] == [(length,) for length in lengths]:
            whole[name] = np.concatenate(values)
        else:
            whole[name] = {str(number): one for number, one in enumerate(values)}
    return whole


def _find_owned(states: Sequence[State], kinds: Mapping[str, StateKind]) -> list[Range] | None:
    """Return the range of elements that each rank owned, () if they were merged before; None: the states lack it."""
    key = next((key for key, kind in kinds.items() if kind == "owned" and key in states[0]), None)
    if key is None:
        return None
    ranges = []
    for rank, state in enumerate(states):
        found = np.asarray(state.get(key))
        if found.dtype.kind not in "iu" or found.shape not in ((0,), (2,)):
            raise ValueError(f"rank {rank} has {key} {_shown(state.get(key))}, not a range: {CURE}")
        ranges.append(tuple(found.tolist()))
    return ranges


def _merge_dicts(
    where: str, states: Sequence[State], kinds: Mapping[str, StateKind], owned: list[Range] | None
) -> State:
    require_same_keys(where, states)
    return {
        key: _merge(one_line(key), [state[key] for state in states], kinds[key], owned)
        for key in states[0]
        if kinds[key] != "owned"
    }


def require_same_keys(where: str, states: Sequence[State]) -> None:
    """Raise ValueError unless the ranks' dicts, which lie in this place of their states, have the same keys."""
    for rank, state in enumerate(states):
        if state.keys() != states[0].keys():
            raise ValueError(f"ranks 0 and {rank} have {listed(states[0])} and {listed(state)} in {where}: {CURE}")


def _merge(key: str, values: list[Any], kind: StateKind, owned: list[Range] | None) -> object:
    if all(isinstance(value, dict) for value in values):
        return _merge_dicts(key, values, dict.fromkeys(values[0], kind), owned)
    arrays = [np.asarray(value) for value in values]
    if kind == "owner" and owned is not None and not any(owned):
        kind = "shared"  # the states were merged before
    for rank, array in enumerate(arrays):
        like = array.shape == arrays[0].shape and array.dtype == arrays[0].dtype
        if not like or (kind == "shared" and array.tobytes() != arrays[0].tobytes()):
            raise ValueError(
                f"ranks 0 and {rank} differ in {key} ({_shown(values[0])} and {_shown(values[rank])}): {CURE}"
            )
    if kind == "shared":
        return values[0]
    if arrays[0].dtype.kind != "f":
        raise ValueError(f"{key} holds {arrays[0].dtype}, of which ranks have no {kind} part: its kind is wrong")
    if kind == "owner":
        return _of_owners(key, arrays) if owned is None else _of_ranges(key, arrays, owned)
    total = np.zeros(arrays[0].shape, np.float64)
    for array in arrays:
        total += array
    return (total / len(arrays)).astype(arrays[0].dtype)


def _of_owners(key: str, arrays: list[AnyArray]) -> AnyArray:
    """Return every element from the rank where it is not 0."""
    whole = np.zeros_like(arrays[0])
    for rank, array in enumerate(arrays):
        owned = array != 0
        if (owned & (whole != 0)).any():
            raise ValueError(f"rank {rank} owns elements of {key} that a lower rank owns too: {CURE}")
        whole[owned] = array[owned]
    return whole


def _of_ranges(key: str, arrays: list[AnyArray], owned: list[Range]) -> AnyArray:
    """Return every element from the rank that owned it."""
    whole, end = np.zeros_like(arrays[0]), 0
    for own, rank in sorted((own, rank) for rank, own in enumerate(owned) if own[:1] != own[1:]):
        if own[0] != end or own[1] > whole.size:
            end = -1
            break
        whole[end : own[1]] = arrays[rank][end : own[1]]
        end = own[1]
    if end != whole.size:
        raise ValueError(
            f"the parts of {key} that ranks owned do not make up its {whole.size} elements: take the states of all "
            "ranks, after the same step"
        )
    return whole


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray) and value.size > 1:
        return f"{value.dtype}{list(value.shape)}"
    return shown(value).strip("'")
