"""Operands of calls, which are refused on every rank where one rank's cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np
from mpi4py import MPI

from collectives.annotations import Array
from collectives.arrays.elements import COMBINE, FLOATS, INTEGERS
from collectives.arrays.vectors import Flat, empty_like, flat, is_read_only
from collectives.errors import reword

if TYPE_CHECKING:
    from collectives.group.group import Group

NUMBERS = (int, float, np.generic)  # as few as will do, since every all-reduce of an array compares its argument
_OPS_OF_MPI = ("SUM", "MIN", "MAX", "PROD", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MINLOC", "MAXLOC")
_CALLS = {op: (f"allreduce({op})", f"allreduce({op}), out") for op in COMBINE}
_NUMERIC = FLOATS + INTEGERS
_SYNONYMS = {"avg": "mean", "average": "mean", "add": "sum", "minimum": "min", "maximum": "max"}


def validate_array(
    comm: Group, x: Array, call: str, allowed: tuple[str, ...], crosses: bool = True, verb: str = "reduce"
) -> Flat:
    """Return the vector of an array, whose element type must be an `allowed` one; `crosses` and `verb` as in `flat`.

    Raises
    ------
    CollectiveMismatch
        Only another rank's array cannot be used.
    TypeError, ValueError, MemoryError
        This rank's array cannot be used; names rank and call.
    """
    try:
        return flat(x, allowed, crosses, verb)
    except (TypeError, ValueError, MemoryError) as error:
        comm.reject(reword(error, f"{comm.here}, {call}: {error}"), call)


def validate_sum(comm: Group, x: Array, op: str, out: Array) -> tuple[Flat, Flat, Array]:
    """Return the vectors of an all-reduce's array and of its result, which do not cross yet, and the result.

    Raises as `validate_array` does.
    """
    call, out_of_call = _CALLS[op]
    source = validate_array(comm, x, call, FLOATS if op == "mean" else _NUMERIC, crosses=False)
    result = allocate_like(comm, x, call) if out is None else out
    target = validate_array(comm, result, out_of_call, (source.dtype,), crosses=False)
    if out is None and target.place is None:
        return source, target, result  # which nothing else refers to
    if target.shape != source.shape:
        refuse_call(comm, call, f"out has shape {target.shape}, the array {source.shape}: pass one of the same shape")
    if not target.values.flags.writeable or (target.place is not None and is_read_only(target, result)):
        refuse_call(comm, call, "out is read-only: pass an array that can be written")
    if source.overlaps(target) and not source.begins_with(target):
        refuse_call(comm, call, "out overlaps the array; pass the array itself or one that shares no memory with it")
    return source, target, result


def allocate_like(comm: Group, x: Array, call: str, shape: tuple[int, ...] | None = None) -> Array:
    """Return a new array of the library and element type of `x`; raises as `validate_array` does if that fails."""
    try:
        return empty_like(x, shape)
    except (TypeError, MemoryError) as error:
        comm.reject(reword(error, f"{comm.here}, {call}: {error}"), call)


def validate_operation(comm: Group, op: object) -> str:
    """Return the name of an all-reduce's operation; raises ValueError on every rank unless an all-reduce can do it.

    MPI's own operations have names of MPI's, and are compared by identity alone.
    """
    if type(op) is str and op in COMBINE:
        return op
    if isinstance(op, MPI.Op):
        name = next((one for one in _OPS_OF_MPI if getattr(MPI, one) == op), "")
        if name.lower() not in COMBINE:
            op = f"MPI.{name}" if name else "an operation of MPI.Op.Create"
            choices = f"MPI.SUM, MPI.MIN, MPI.MAX, {_choices()}"
            comm.reject(ValueError(f"{comm.here}: op is {op}; choose one of {choices}"), f"allreduce({op})")
        return name.lower()
    if not isinstance(op, str) or op not in COMBINE:
        word = str(op).rpartition(".")[2].lower()
        meant = word if word in COMBINE else _SYNONYMS.get(word)
        cure = f"write {meant!r}, or choose" if meant else "choose"
        comm.reject(ValueError(f"{comm.here}: op is {op!r}; {cure} one of {_choices()}"), f"allreduce({op})")
    return str(op)  # of a class of its own, such as NumPy's


def _choices() -> str:
    return ", ".join(map(repr, COMBINE))


def require_root(comm: Group, root: int, call: str) -> None:
    """Raise ValueError unless `root` is a rank; the other ranks then raise CollectiveMismatch."""
    if not isinstance(root, int | np.integer) or not 0 <= root < comm.size:
        comm.reject(
            ValueError(f"{comm.here}: there is no rank {root!r} to broadcast from: pass 0 to {comm.size - 1}"), call
        )


def refuse_call(comm: Group, call: str, problem: object, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise an error with rank and call here, and CollectiveMismatch on the other ranks."""
    comm.reject(kind(f"{comm.here}, {call}: {problem}"), call)
