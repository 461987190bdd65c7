"""What users hand to a collective: checked, and refused on every rank where it cannot be used on one."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from collectives.group import Group
from collectives.memory import FLOATS, INTEGERS, Flat, empty_like, flat


def operand(group: Group, x: Any, call: str, allowed: tuple[str, ...]) -> Flat:
    """The vector of an array, whose element type must be an `allowed` one.

    Raises
    ------
    CollectiveMismatch
        Only another rank's array cannot be used.
    TypeError, ValueError
        This rank's cannot; names rank and call.
    """
    try:
        return flat(x, allowed)
    except (TypeError, ValueError) as error:
        group.reject(type(error)(f"{group.here}, {call}: {error}"), call)


def writable_operand(group: Group, x: Any, call: str, allowed: tuple[str, ...]) -> Flat:
    """Like `operand`, but it must not be read-only."""
    vector = operand(group, x, call, allowed)
    if not vector.values.flags.writeable:
        _refuse(group, call, "the array is read-only; pass one that can be written")
    return vector


def operands(group: Group, x: Any, op: str, out: Any) -> tuple[Flat, Flat, Any]:
    """Vectors of an all-reduce's array and of its result, and the result; raises what `operand` does."""
    call = f"allreduce({op})"
    if op not in ("sum", "mean"):
        group.reject(ValueError(f"{group.here}: op is {op!r}; choose 'sum' or 'mean'"), call)
    source = operand(group, x, call, FLOATS + INTEGERS if op == "sum" else FLOATS)
    result = empty_like(x) if out is None else out
    target = operand(group, result, f"{call}, out", (source.dtype,))
    if target.shape != source.shape or not target.values.flags.writeable:
        _refuse(group, call, f"out has shape {target.shape}, the array {source.shape}, and out must be writeable")
    apart = not np.may_share_memory(source.values, target.values)
    if not apart and source.values.ctypes.data != target.values.ctypes.data:
        _refuse(group, call, "out overlaps the array; pass the array itself or one that shares no memory with it")
    return source, target, result


def _refuse(group: Group, call: str, problem: str) -> NoReturn:
    group.reject(ValueError(f"{group.here}, {call}: {problem}"), call)
