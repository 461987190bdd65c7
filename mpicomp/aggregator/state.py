"""States of aggregators: all of one is looked at before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OF_ALL = ("method", "n", "step")


def check(state: Mapping[str, Any], like: Mapping[str, Any], aggregator: str, where: str, nan: str) -> dict[str, Any]:
    """What a state holds, if it is one that an aggregator can go on from.

    Parameters
    ----------
    state : dict
    like : dict
        A state of the aggregator: "method" and "n", which must be equal, "step", and arrays that the state's must be
        like in shape.
    aggregator, where : str
        For the message.
    nan : str
        The array that may hold NaN; all else is finite.

    Returns
    -------
    dict
        "step", and arrays in the types of those in `like`; perhaps the state's own, not copies.

    Raises
    ------
    ValueError
        The state is another method's, of another length, of options that keep other things, or not finite.
    """
    if state.keys() != like.keys() or any(str(state[key]) != str(like[key]) for key in ("method", "n")):
        raise ValueError(
            f"{where}: this state of {state.get('n', '?')} elements by {state.get('method', 'no method')} with "
            f"{sorted(state)} is not one of {aggregator}, which has {sorted(like)}"
        )
    try:
        arrays = {key: _numbers(state, key, one, key == nan) for key, one in like.items() if key not in _OF_ALL}
        return {"step": _counter(state, "step"), **arrays}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _counter(state: Mapping[str, Any], name: str) -> int:
    value = np.asarray(state[name])
    if value.shape or value.dtype.kind not in "iu" or value < 0:
        raise ValueError(f"this state's {name} is {state[name]!r}, no integer of 0 or more: take an earlier one")
    return int(value)


def _numbers(state: Mapping[str, Any], name: str, like: NDArray[Any], nan: bool) -> NDArray[Any]:
    found = np.asarray(state[name])
    if found.shape != like.shape:
        raise ValueError(
            f"this state's {name} has shape {found.shape}, not {like.shape}: start the aggregator with the options and "
            "tensor_lengths of the one that it was taken from"
        )
    if found.dtype.kind not in "fiu":
        raise ValueError(f"this state's {name} holds {found.dtype}, not numbers: take an earlier one")
    with np.errstate(over="ignore"):  # looked for next
        taken = found.astype(like.dtype, copy=False)
    if not (np.isfinite(taken) | (nan and np.isnan(taken))).all():
        raise ValueError(f"this state's {name} holds NaN or infinity in {like.dtype}: take an earlier one")
    return taken
