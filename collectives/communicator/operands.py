"""Arguments of collectives: validated, and refused on every rank where one rank's cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from collectives.annotations import Array
from collectives.arrays.elements import COMBINE, FLOATS, INTEGERS
from collectives.arrays.vectors import Flat, empty_like, flat, is_read_only
from collectives.consistency.call_check import fingerprint

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator

_OPS_OF_MPI = ("SUM", "MIN", "MAX", "PROD", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MINLOC", "MAXLOC")
_CALLS = {op: (f"allreduce({op})", f"allreduce({op}), out") for op in COMBINE}
_NUMERIC = FLOATS + INTEGERS
_SYNONYMS = {"avg": "mean", "average": "mean", "add": "sum", "minimum": "min", "maximum": "max"}


def operand(comm: Communicator, x: Array, call: str, allowed: tuple[str, ...], crosses: bool = True) -> Flat:
    """Return the vector of an array, whose element type must be an `allowed` one; `crosses` as in `flat`.

    Raises
    ------
    CollectiveMismatch
        Only another rank's array cannot be used.
    TypeError, ValueError, MemoryError
        This rank's array cannot be used; names rank and call.
    """
    try:
        return flat(x, allowed, crosses)
    except (TypeError, ValueError, MemoryError) as error:
        comm.reject(type(error)(f"{comm.here}, {call}: {error}"), call)


def writable_operand(comm: Communicator, x: Array, call: str, allowed: tuple[str, ...]) -> Flat:
    """Return the vector of an array that must not be read-only; raises as `operand` does."""
    vector = operand(comm, x, call, allowed)
    if is_read_only(vector, x):
        _refuse(comm, call, "the array is read-only; pass one that can be written")
    return vector


def operands(comm: Communicator, x: Array, op: str, out: Array) -> tuple[Flat, Flat, Array]:
    """Return the vectors of an all-reduce's array and of its result, which do not cross yet, and the result.

    Raises as `operand` does.
    """
    call, out_of_call = _CALLS[op]
    source = operand(comm, x, call, FLOATS if op == "mean" else _NUMERIC, crosses=False)
    result = like_operand(comm, x, call) if out is None else out
    target = operand(comm, result, out_of_call, (source.dtype,), crosses=False)
    if target.shape != source.shape:
        _refuse(comm, call, f"out has shape {target.shape}, the array {source.shape}: pass one of the same shape")
    if not target.values.flags.writeable or (target.place is not None and is_read_only(target, result)):
        _refuse(comm, call, "out is read-only: pass an array that can be written")
    if source.overlaps(target) and not source.begins_with(target):
        _refuse(comm, call, "out overlaps the array; pass the array itself or one that shares no memory with it")
    return source, target, result


def like_operand(comm: Communicator, x: Array, call: str, shape: tuple[int, ...] | None = None) -> Array:
    """Return a new array of the library and element type of `x`; raises as `operand` does if that fails."""
    try:
        return empty_like(x, shape)
    except (TypeError, MemoryError) as error:
        comm.reject(type(error)(f"{comm.here}, {call}: {error}"), call)
    except RuntimeError as error:  # PyTorch's, where there is no memory
        comm.reject(MemoryError(f"{comm.here}, {call}: {error}"), call)


def rows_operand(comm: Communicator, x: Array, call: str, allowed: tuple[str, ...]) -> Flat:
    """Return the vector of an array that is to be put below those of other ranks; raises as `operand` does."""
    rows = operand(comm, x, call, allowed)
    if not rows.shape:
        _refuse(comm, call, "an array without dimensions has no rows; pass x.reshape(1)")
    like_operand(comm, x, call, (0, *rows.shape[1:]))  # before anything is sent: can there be a result?
    return rows


def operation(comm: Communicator, op: object) -> str:
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


def require_root(comm: Communicator, root: int, call: str) -> None:
    """Raise ValueError on every rank unless `root` is a rank."""
    if root not in range(comm.size):
        comm.agree(fingerprint(call), lambda: call)
        raise ValueError(f"{comm.here}: there is no rank {root} to broadcast from")


def _refuse(comm: Communicator, call: str, problem: str) -> NoReturn:
    comm.reject(ValueError(f"{comm.here}, {call}: {problem}"), call)
