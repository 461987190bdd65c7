"""The schema of rank states, and the checks of states that a file may have held.

A state is the wrapped optimizer's own, if there is one, and under "mpicomp" the entries of a schema: those of `RANK`,
and those of its owner. ``kinds`` declares for each aggregator the fate of its state's entries on other ranks: "mean",
"owner", "owned" or "shared". Tensors go by the parameters' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from collectives.json_file import fields
from collectives.quoting import one_line, shown

STATE_KEY = "mpicomp"
"""Entry of a state that holds residuals and counters, next to the wrapped optimizer's own."""

State: TypeAlias = dict[str, Any]
NamedTensors: TypeAlias = Mapping[str, Tensor]
EntryType: TypeAlias = type | Literal["counter", "tensors"]
"""Type of an entry; "counter": an integer from 0 to 2^63 - 1, "tensors": floating-point tensors by name."""

_MOST = 2**63 - 1


class StateSchema:
    """Declared entries of a state, or of a part of one. A state may have other entries.

    Parameters
    ----------
    entries
        Their types, by name.
    foreign
        Error message for a whole state without such entries, in which {state} is replaced by the state.
    """

    def __init__(self, entries: Mapping[str, EntryType], foreign: str = "") -> None:
        self.entries, self._foreign = entries, foreign

    def extended(self, entries: Mapping[str, EntryType], foreign: str = "") -> StateSchema:
        """Return a schema with more entries."""
        return StateSchema({**self.entries, **entries}, foreign or self._foreign)

    def check(self, part: object) -> State:
        """Return a part of a state; raise ValueError unless its entries have their types."""
        types = {name: one if isinstance(one, type) else _TYPES[one] for name, one in self.entries.items()}
        try:
            found = fields(part, **types)
        except ValueError as error:
            raise ValueError(
                f"the state under {STATE_KEY!r} is damaged, or of another class of optimizer or hook ({error}); load "
                "an earlier one of the same class"
            ) from error
        for name, one in self.entries.items():
            if one == "counter" and not 0 <= found[name] <= _MOST:
                raise ValueError(
                    f"the state's {name} is {shown(found[name])}, not an integer from 0 to 2^63 - 1; load an earlier "
                    "one"
                )
        return found

    def check_tensors(self, part: State, expected: Mapping[str, NamedTensors]) -> None:
        """Raise ValueError unless the "tensors" of a part have the names and shapes of the `expected` ones."""
        for name, one in self.entries.items():
            if one == "tensors":
                _require_like(name, part[name], expected[name])

    def own_part(self, state: object) -> State:
        """Return the checked entries of a state under "mpicomp"; raise ValueError if there are no such entries."""
        own = state.get(STATE_KEY) if isinstance(state, dict) else None
        if own is not None:
            return self.check(own)
        if isinstance(state, dict) and not self._foreign:
            raise ValueError(
                "this is a plain optimizer's state, without residuals; load it into .optimizer, the wrapped optimizer"
            )
        foreign = self._foreign or "the state is {state}, not a dict; load a result of state_dict"
        raise ValueError(foreign.format(state=shown(state)))


_TYPES: dict[str, type] = {"counter": int, "tensors": dict}

# Each rank has values of its own; all other entries are equal on all ranks, also where their number changes.
RANK = StateSchema({"rank": int, "ranks": int, "aggregators": list})  # aggregators: state of each bucket's
# buckets: names of each bucket's parameters. rounds: counters; under "updates" also masters and, after local steps, the
# common model. optimizer: class of the wrapped one. parameters, shapes: in its order, by which its state goes
WRAPPER = RANK.extended({
    "mode": str, "rounds": dict, "buckets": list, "optimizer": str, "parameters": list, "shapes": list,
})  # fmt: skip
GRADIENT_ROUNDS = StateSchema({"rounds": "counter"})
UPDATE_ROUNDS = GRADIENT_ROUNDS.extended({"steps": "counter", "masters": "tensors", "common": "tensors"})
# entry "outer" of rounds, equal on all ranks: groups with the names of their parameters, and states by name
OUTER = StateSchema({"class": str, "groups": list, "state": dict})
# entry "fragments" of rounds: the steps since fragment 0 was due, each parameter's fragment, and the fragments whose
# means are not applied yet
FRAGMENTS = StateSchema({"turn": "counter", "numbers": dict, "in_flight": list})
IN_FLIGHT = StateSchema({"fragment": "counter", "remaining": "counter", "means": "tensors"})
# of blend="steps": moves are the vectors that this rank has sent
IN_FLIGHT_STEPS = IN_FLIGHT.extended({"moves": "tensors"})
# options: of the optimizer. own_momenta: of each rank, and other ranks take their mean
MOMENTUM = RANK.extended(
    {"options": str, "frozen": bool, "freeze_rule": dict, "steps": "counter", "masters": "tensors"},
    foreign="the state is {state}, not one of OneBitAdam or its relatives; load a result of state_dict",
)
OWN_MOMENTA = "own_momenta"
# "joined" of the states of OneBitAdam to which parameters were added: an entry for each time, with the step before it
JOINED = StateSchema({"buckets": list, "joined": "counter", "frozen": bool, "freeze_rule": dict})
FREEZE_RULE = StateSchema({"rates": list})
DDP_HOOK = RANK.extended(
    {"iterations": "counter", "buckets": list},
    foreign="the state is {state}; load a result of state_dict of a hook's state",
)


def cannot_load(optimizer: str, error: Exception) -> ValueError:
    """Return the error for an optimizer that does not take its part of a state: torch checks little itself."""
    return ValueError(
        f"{optimizer} cannot load its part of the state ({type(error).__name__}: {one_line(error)}); build it with the "
        "same options, or load an earlier state"
    )


def wrapped_part(state: State) -> State:
    """Return a state's entries that are the wrapped optimizer's own."""
    return {key: value for key, value in state.items() if key != STATE_KEY}


def with_tensors(state: State) -> State:
    """Return an aggregator's state with tensors for arrays, as ``torch.load`` reads it under ``weights_only=True``."""
    return {key: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for key, one in state.items()}


def with_arrays(state: Any) -> Any:
    """Return an aggregator's state with arrays for tensors, on the memory of those of the host; others unchanged.

    Raises
    ------
    ValueError
        NumPy has no type for a tensor.
    """
    if not isinstance(state, dict):
        return state
    for key, one in state.items():
        require_wide(key, one)
    try:
        return {key: one.detach().cpu().numpy() if torch.is_tensor(one) else one for key, one in state.items()}
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"a tensor of the state cannot be taken ({one_line(error)}); load an earlier state") from error


def require_wide(name: str, value: object) -> None:
    """Raise ValueError if an entry of an aggregator is a tensor of 16 bits, which would round the residual."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.element_size() < 4:
        raise ValueError(
            f"the state's {name} is {str(value.dtype).removeprefix('torch.')}, and residuals are float32, also of "
            "models in 16 bits: save the result of state_dict without a conversion"
        )


def _require_like(name: str, found: dict[str, Any], expected: NamedTensors) -> None:
    if not all(isinstance(one, Tensor) and one.is_floating_point() and not one.is_sparse for one in found.values()):
        raise ValueError(f"the state's {name} is {shown(found)}, not tensors of numbers by name")
    shapes, wanted = ({key: tuple(one.shape) for key, one in group.items()} for group in (found, expected))
    if shapes != wanted:
        differing = sorted(key for key in {**shapes, **wanted} if shapes.get(key) != wanted.get(key))
        raise ValueError(
            f"the state's {name} differs in {shown(differing)}: it has shapes {shown(shapes)}, here they would be "
            f"{shown(wanted)}; build the optimizer with the same options and model"
        )
