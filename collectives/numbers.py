"""All-reduces of one Python number each, such as a loss or a count."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.elements import COMBINE
from collectives.consistency.call_check import fingerprint
from collectives.execution.handle import Call
from collectives.group import Group
from collectives.json_file import shown
from collectives.trace.traffic import Traffic

NUMBERS = (int, float, np.generic)  # as few as will do, since every all-reduce of an array asks
_MOST = 2**63 - 1


def allreduce_number(group: Group, number: Any, op: str, out: Any, traffic: Traffic) -> bool | int | float:
    """See `Communicator.allreduce`. The number travels with the check of the call, whatever the topology."""
    name = f"allreduce({op})"
    if out is not None:
        group.reject(TypeError(f"{group.here}, {name}: a number is returned, not written to out"), name)
    kind = _kind(number)
    if kind is None:
        told = f"cannot reduce {type(number).__name__}: pass a bool, an int or a float"
        group.reject(TypeError(f"{group.here}, {name}: {told}"), name)
    text = f"{name} of a number of type {kind.__name__}"
    values = np.array([float(number)]) if kind is float else _integer(group, int(number), op, name)
    call, result = Call(group, lambda: text, traffic.clock), values.copy()
    group.run(call, group.check(call, fingerprint(text), traffic, values, result, combine=COMBINE[op]))
    traffic.calls += 1
    if op == "mean":
        return float(result.item() / group.size)
    return int(result.item()) if op == "sum" and kind is bool else kind(result.item())


def _kind(number: Any) -> type[bool] | type[int] | type[float] | None:
    """Python's type of Python's and NumPy's numbers; None for other scalars of NumPy."""
    if isinstance(number, bool | np.bool_):
        return bool
    if isinstance(number, int | np.integer):
        return int
    return float if isinstance(number, float | np.floating) else None


def _integer(group: Group, number: int, op: str, name: str) -> NDArray[np.int64]:
    """An integer as it travels, in 64 bits; none is taken whose sum may have more."""
    most = _MOST // group.size if op in ("sum", "mean") else _MOST
    if abs(number) > most:
        told = f"the integer {shown(number)} is beyond {most}, so that 64 bits may not hold the result"
        group.reject(ValueError(f"{group.here}, {name}: {told}; pass a float"), name)
    return np.array([number], np.int64)
