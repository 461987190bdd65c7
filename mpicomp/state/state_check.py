"""States of aggregators: a whole state is checked before any of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.quoting import listed, one_line, shown

OWNED = "owned"  # the entry that tells whose the errors of owners in a state are
_OF_ALL = ("method", "n", "step")
_MOST_STEPS = 2**63 - 1


def check(state: Mapping[str, Any], like: Mapping[str, Any], aggregator: str, where: str, nan: str) -> dict[str, Any]:
    """Return the content of a state, if an aggregator can go on from it.

    Parameters
    ----------
    state : dict
    like : dict
        A state of the aggregator: "method" and "n", which must be equal, "step", and arrays that the state's must be
        like in shape.
    aggregator, where : str
        For the message.
    nan : str
        The array that may be NaN as a whole; all else is finite.

    Returns
    -------
    dict
        "step", and arrays in the types of those in `like`; perhaps the state's own, not copies.

    Raises
    ------
    ValueError
        The state is another method's, of another length, of options that keep other things, or not finite; one line.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"{where}: this state is {shown(state)}, not a dict: load what state_dict returned")
    same = state.keys() - {OWNED} == like.keys()
    if not same or any(_plain(state[key]) != (type(like[key]), like[key]) for key in ("method", "n")):
        of, by = (shown(_plain(state.get(key))[1]).strip("'") for key in ("n", "method"))
        raise ValueError(
            f"{where}: this state of {of} elements by {by} with {listed(state)} is not one of {aggregator}, which has "
            f"{listed(like)}"
        )
    try:
        arrays = {key: _numbers(state, key, one, key == nan) for key, one in like.items() if key not in _OF_ALL}
        return {"step": _step(state["step"]), **arrays}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def check_owned(state: Mapping[str, Any], key: str, own: range, where: str) -> None:
    """Raise unless a rank can take its own part of an array of owners' errors without any rank's being lost.

    Parameters
    ----------
    state : dict
        Has the array; and, unless an earlier version made it, the range of elements that the rank owned for which it
        was taken. `redistribute` leaves an empty range: the array then has the errors of all owners.
    key : str
        The array's.
    own : range
        The elements that this rank owns.
    where : str
        For the message.

    Raises
    ------
    ValueError
        The state was taken with other owners, or its range is damaged; one line.
    """
    errors, cure = np.asarray(state[key]), "load what mpicomp.redistribute makes of the states of all ranks"
    if OWNED not in state:
        if np.any(errors[: own.start]) or np.any(errors[own.stop :]):
            raise ValueError(
                f"{where}: this state's {key} has elements that this rank does not own ({_elements(own)} are its): it "
                f"was taken over another topology or by another number of ranks; {cure}"
            )
        return
    found = np.asarray(state[OWNED])
    if found.dtype.kind not in "iu" or found.shape not in ((0,), (2,)):
        raise ValueError(f"{where}: this state's {OWNED} is {shown(state[OWNED])}, not a range: take an earlier one")
    if found.size and tuple(found.tolist()) != (own.start, own.stop):
        raise ValueError(
            f"{where}: this state was taken by the owner of {_elements(range(*found.tolist()))}, and this rank owns "
            f"{_elements(own)}: the topology, the number of ranks or the codec is another one; {cure}"
        )


def _elements(some: range) -> str:
    return f"elements {some.start} to {some.stop - 1}" if some else "no elements"


def _plain(value: Any) -> tuple[type, Any]:
    """Return Python's type and value of a single number or text, also of one that came from a file of arrays."""
    if isinstance(value, np.ndarray | np.generic) and not value.shape:
        value = value.item()
    return type(value), value if isinstance(value, int | str) else None


def _step(found: Any) -> int:
    kind, step = _plain(found)
    if kind is not int or not 0 <= step <= _MOST_STEPS:
        raise ValueError(f"this state's step is {shown(found)}, not an integer from 0 to 2^63 - 1: take an earlier one")
    return int(step)


def _numbers(state: Mapping[str, Any], name: str, like: NDArray[Any], nan: bool) -> NDArray[Any]:
    try:
        found = np.asarray(state[name])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"this state's {name} is no array ({one_line(error)}): take an earlier one") from error
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
    if nan and np.isnan(taken).any() != np.isnan(taken).all():
        raise ValueError(f"this state's {name} holds NaN for some tensors and numbers for others: take an earlier one")
    return taken
