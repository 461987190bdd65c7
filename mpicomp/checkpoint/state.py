"""States of aggregators on disk, and on another number of ranks than they were taken on.

A file is an npz archive, read without pickle: the arrays by number, ``state`` with the JSON text of everything else,
and ``sha256`` of all that.

Where other ranks go on, sums stay right as follows. A residual is what a rank has yet to contribute to a *mean*, so
what is pending is the mean of the residuals, and each new rank starts from it. Errors of those who own parts of the
vector stay with the parts. Counters and scales are the same on all ranks.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.checkpoint.atomic_file import replacing
from mpicomp.checkpoint.tree import join, split

if TYPE_CHECKING:
    from mpicomp.aggregator.algorithm import StateKind

State = dict[str, Any]
_TEXT, _DIGEST = "state", "sha256"
# NumPy reads headers by `ast.literal_eval`, and CPython 3.11's parser counts the depth of all threads' trees together:
# two at a time may end in a SystemError (python/cpython#106905).
_reading = threading.Lock()


def save_state(path: str | PathLike[str], state: State) -> None:
    """Write a state to a file, which is replaced whole or not at all.

    Parameters
    ----------
    path
        Of the file; one per rank, in a folder that is there.
    state : dict
        As from ``aggregator.state_dict()``: arrays, numbers, texts, None, and dicts, lists and tuples of these.

    Raises
    ------
    TypeError
        Something else is in it.
    OSError
        The file cannot be written.
    """
    arrays, text = split(state, {"array": np.ndarray})
    for array in arrays.values():
        if array.dtype.hasobject:
            raise TypeError(f"cannot pack an array of {array.dtype} into a checkpoint")
    members = {_TEXT: np.frombuffer(text.encode(), np.uint8), _DIGEST: _digest(arrays, text), **arrays}
    with replacing(Path(path)) as file:
        np.savez(file, **members)


def load_state(path: str | PathLike[str]) -> State:
    """Read what `save_state` wrote.

    Raises
    ------
    ValueError
        The file is truncated, altered, or no such file.
    OSError
        It cannot be read.
    """
    with Path(path).open("rb") as file, _reading:
        try:
            members = dict(np.load(file, allow_pickle=False))
            text, digest = bytes(members.pop(_TEXT)).decode(), members.pop(_DIGEST)
        except KeyError as error:
            raise ValueError(f"{path} holds no state: name a file that save_state wrote") from error
        except Exception as error:  # whatever zip, zlib and NumPy make of bytes that are not theirs
            raise ValueError(f"{path} is truncated, altered or no state ({error}): load an earlier one") from error
    if not np.array_equal(digest, _digest(members, text)):
        raise ValueError(f"{path} is altered (its SHA-256 is not the one it names): load an earlier one")
    state: State = join(text, {"array": members.__getitem__})
    return state


def _digest(arrays: Mapping[str, NDArray[Any]], text: str) -> NDArray[np.uint8]:
    """SHA-256 of a text and of arrays with their names, types and shapes."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"{name} {array.dtype.str} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return np.frombuffer(sha.digest(), np.uint8)


def redistribute(states: Sequence[State], ranks: int, kinds: Mapping[str, StateKind]) -> list[State]:
    """What each of `ranks` ranks goes on from, where others were before.

    Parameters
    ----------
    states : sequence of dict
        Of all ranks that there were, in rank order, taken after the same step.
    ranks : int
        That there are now.
    kinds : dict
        ``aggregator.state_kinds``: whether a key is the ranks' "mean" (taken in float64, rounded once), the "owner"'s
        part of a vector, or "shared".

    Returns
    -------
    list of dict
        In rank order; they share their arrays.

    Raises
    ------
    ValueError
        The states do not belong together, or not to an aggregator of these `kinds`.
    """
    if ranks < 1 or not states:
        raise ValueError(f"a state goes from 1 rank or more to 1 or more, not from {len(states)} to {ranks}")
    unknown = sorted(set(states[0]) - set(kinds))
    if unknown:
        named = ", ".join(unknown)
        raise ValueError(f"nothing says what {named} are on other ranks: pass the state_kinds of their aggregator")
    merged = _merge_dicts("", states, kinds)
    return [dict(merged) for _ in range(ranks)]


def _merge_dicts(where: str, states: Sequence[State], kinds: Mapping[str, StateKind]) -> State:
    for rank, state in enumerate(states):
        if state.keys() != states[0].keys():
            raise ValueError(
                f"ranks 0 and {rank} have states with {sorted(states[0])} and {sorted(state)}{where}: take those of "
                "one run, after the same step"
            )
    return {key: _merge(key, [state[key] for state in states], kinds[key]) for key in states[0]}


def _merge(key: str, values: list[Any], kind: StateKind) -> Any:
    if all(isinstance(value, dict) for value in values):
        return _merge_dicts(f" in {key}", values, dict.fromkeys(values[0], kind))
    arrays = [np.asarray(value) for value in values]
    for rank, array in enumerate(arrays):
        like = array.shape == arrays[0].shape and array.dtype == arrays[0].dtype
        if not like or (kind == "shared" and array.tobytes() != arrays[0].tobytes()):
            raise ValueError(
                f"ranks 0 and {rank} differ in {key} ({_shown(values[0])} and {_shown(values[rank])}): take states of "
                "one run, after the same step"
            )
    if kind == "shared":
        return values[0]
    if arrays[0].dtype.kind != "f":
        raise ValueError(f"{key} holds {arrays[0].dtype}, of which ranks have no {kind} part: its kind is wrong")
    if kind == "owner":
        return _of_owners(key, arrays)
    total = np.zeros(arrays[0].shape, np.float64)
    for array in arrays:
        total += array
    return (total / len(arrays)).astype(arrays[0].dtype)


def _of_owners(key: str, arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Every element from the rank that owned it."""
    whole = np.zeros_like(arrays[0])
    for rank, array in enumerate(arrays):
        owned = array != 0
        if (owned & (whole != 0)).any():
            raise ValueError(f"rank {rank} owns elements of {key} that a lower rank owns too: take states of one run")
        whole[owned] = array[owned]
    return whole


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) and value.size > 1 else str(value)
