"""Collectives that move arrays and objects or reduce numbers, and validation of the arrays that collectives take.

Objects are pickled: settings, names and records, not large arrays. Unpickling runs code that the sender chose, and the
sender is always a rank of the same communicator.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from mpi4py import MPI

from collectives.annotations import Array, Bytes, Indices, Kept
from collectives.arrays.elements import COMBINE, COPIED, FLOATS, INTEGERS
from collectives.arrays.vectors import Flat, empty_like, flat, is_read_only
from collectives.consistency.descriptions import fingerprint
from collectives.dense.broadcast_gather import (
    all_gather_rows,
    broadcast_chain,
    broadcast_payload,
    broadcast_steps,
    gather_payloads,
    gather_sizes,
    is_long,
)
from collectives.errors import is_of_handler, refusal
from collectives.execution.handle import Call, Steps, keep_uncompiled
from collectives.execution.staged import stage
from collectives.execution.traffic import Traffic
from collectives.quoting import one_line, shown

if TYPE_CHECKING:
    from collectives.group.group import Group

_Object = TypeVar("_Object")
NUMBERS = (int, float, np.generic)  # as few as will do, since every all-reduce of an array compares its argument
_MOST = 2**63 - 1
_OPS_OF_MPI = ("SUM", "MIN", "MAX", "PROD", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MINLOC", "MAXLOC")
_CALLS = {op: (f"allreduce({op})", f"allreduce({op}), out") for op in COMBINE}
_NUMERIC = FLOATS + INTEGERS
_SYNONYMS = {"avg": "mean", "average": "mean", "add": "sum", "minimum": "min", "maximum": "max"}


# Arguments, which are refused on every rank where one rank's cannot be used -------------------------------------------


def validate_array(comm: Group, x: Array, call: str, allowed: tuple[str, ...], crosses: bool = True) -> Flat:
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
        comm.reject(refusal(error, f"{comm.here}, {call}: {error}"), call)


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
        _refuse(comm, call, f"out has shape {target.shape}, the array {source.shape}: pass one of the same shape")
    if not target.values.flags.writeable or (target.place is not None and is_read_only(target, result)):
        _refuse(comm, call, "out is read-only: pass an array that can be written")
    if source.overlaps(target) and not source.begins_with(target):
        _refuse(comm, call, "out overlaps the array; pass the array itself or one that shares no memory with it")
    return source, target, result


def allocate_like(comm: Group, x: Array, call: str, shape: tuple[int, ...] | None = None) -> Array:
    """Return a new array of the library and element type of `x`; raises as `validate_array` does if that fails."""
    try:
        return empty_like(x, shape)
    except (TypeError, MemoryError) as error:
        comm.reject(refusal(error, f"{comm.here}, {call}: {error}"), call)


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
        comm.reject(ValueError(f"{comm.here}: there is no rank {root!r} to broadcast from"), call)


def _refuse(comm: Group, call: str, problem: object, kind: type[Exception] = ValueError) -> NoReturn:
    comm.reject(kind(f"{comm.here}, {call}: {problem}"), call)


# Arrays ---------------------------------------------------------------------------------------------------------------


@keep_uncompiled
def broadcast(comm: Group, x: Kept, root: int = 0) -> Kept:
    """Overwrite `x`, of equal shape and dtype everywhere, with rank `root`'s; returns `x`.

    Parameters
    ----------
    x : array
        NumPy or DLPack, contiguous, of a dtype of `allreduce`, of bool, or of integers of 8 or 16 bits. Overwritten
        except on `root`.
    root : int

    Returns
    -------
    array
        `x`.

    Raises
    ------
    CollectiveMismatch, CollectiveTimeout, PeerFailure
    TypeError, ValueError
        This rank's array cannot be overwritten, or there is no rank `root`; the others then raise CollectiveMismatch.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def start_from_rank_1(comm):
    ...     return comm.broadcast(np.full(2, comm.rank), root=1).tolist()
    >>> mpicomp.run_local(3, start_from_rank_1)
    [[1, 1], [1, 1], [1, 1]]
    """
    name = f"broadcast(root={root})"
    vector = validate_array(comm, x, name, COPIED)
    if is_read_only(vector, x):
        _refuse(comm, name, "the array is read-only; pass one that can be written")
    text = f"{name} of {vector.dtype}{list(vector.shape)}"
    require_root(comm, root, text)
    nbytes = vector.values.nbytes
    call = Call(comm, lambda: text)
    call.is_compared = is_long(vector)

    def check(ready: Indices | None) -> Steps:
        return comm.check(call, fingerprint(text), None, ready, ready)

    with comm.observe("broadcast", root=root, bytes=nbytes):
        program = partial(comm.routes.program, broadcast_chain(nbytes, root), nbytes, 64, nbytes)
        comm.run(call, broadcast_steps(call, vector, root, check, program))
    return x


@keep_uncompiled
def allgather(comm: Group, x: Kept) -> Kept:
    """Return the rows of all ranks in one new array, rank 0's first; the same on every rank.

    Parameters
    ----------
    x : array[n, ...]
        Of a dtype of `broadcast`, contiguous. `n` may differ from rank to rank and may be 0; dtype and shape of a
        row are equal on all ranks.

    Returns
    -------
    like x, array[sum of the ranks' n, ...]

    Raises
    ------
    CollectiveMismatch
        The ranks differ in dtype or shape of a row.
    TypeError, ValueError
        This rank's array cannot be gathered; the others then raise CollectiveMismatch.
    CollectiveTimeout, PeerFailure

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> mpicomp.run_local(3, lambda comm: comm.allgather(np.full(comm.rank, comm.rank)).tolist())[0]
    [1, 2, 2]
    """
    rows = validate_array(comm, x, "allgather", COPIED)
    if not rows.shape:
        _refuse(comm, "allgather", "an array without dimensions has no rows; pass x.reshape(1)")
    allocate_like(comm, x, "allgather", (0, *rows.shape[1:]))  # before anything is sent: can there be a result?
    text = f"allgather of rows of {rows.dtype}{list(rows.shape[1:])}"
    call = Call(comm, lambda: text)
    with comm.observe("allgather", bytes=rows.values.nbytes):
        call.remake = lambda: stage(
            call, all_gather_rows(call, comm.check(call, fingerprint(text)), x, rows), rows.staging, None
        )
        gathered: Kept = comm.run(call, call.remake())
    return gathered


@keep_uncompiled
def barrier(comm: Group) -> None:
    """Wait until every rank is here.

    Raises
    ------
    CollectiveMismatch, CollectiveTimeout, PeerFailure

    Examples
    --------
    >>> import mpicomp
    >>> files = []
    >>> def read(comm):
    ...     if comm.rank == 0:
    ...         files.append("data")  # such as a download, to a folder that all ranks see
    ...     comm.barrier()
    ...     return files[0]
    >>> mpicomp.run_local(3, read)
    ['data', 'data', 'data']
    """
    call = Call(comm, lambda: "barrier()")
    call.remake = lambda: _barrier(comm, call, comm.check(call, fingerprint("barrier")))
    with comm.observe("barrier"):
        comm.run(call, call.remake())


def _barrier(comm: Group, call: Call, check: Steps) -> Steps:
    yield from check
    if comm.size > 1:
        yield from call.turn()
        missing = f"{comm.here}: not all ranks reach the barrier"
        yield from comm.await_request(call, comm.mpi_comm.Ibarrier(), lambda: missing)


# Objects --------------------------------------------------------------------------------------------------------------


@keep_uncompiled
def broadcast_object(comm: Group, obj: object, root: int = 0) -> Any:
    """Return rank `root`'s object: itself there, and copies on other ranks.

    The object is pickled. Unpickling runs code that `root` chose: trust the program of every rank.

    Parameters
    ----------
    obj : object
        Read on `root` alone.
    root : int

    Returns
    -------
    object

    Raises
    ------
    TypeError
        This rank cannot pickle or unpickle it; the others then raise CollectiveMismatch.
    ValueError
        There is no rank `root`; the others then raise CollectiveMismatch.
    CollectiveMismatch, CollectiveTimeout, PeerFailure

    Examples
    --------
    >>> import mpicomp
    >>> def configure(comm):
    ...     return comm.broadcast_object({"lr": 0.1} if comm.rank == 0 else None)
    >>> mpicomp.run_local(2, configure)
    [{'lr': 0.1}, {'lr': 0.1}]
    """
    require_root(comm, root, f"broadcast_object(root={root})")
    name = f"broadcast_object(root={root})"
    with comm.observe("broadcast_object", root=root):
        payload = _pickle(comm, obj, name) if comm.rank == root else np.empty(0, np.uint8)
        call = Call(comm, lambda: name)
        landed = comm.run(call, _broadcast(comm, call, name, payload, root))
        objects = _unpickle(comm, [] if comm.rank == root else [landed], name)
    return objects[0] if objects else obj


@keep_uncompiled
def allgather_object(comm: Group, obj: _Object) -> list[_Object]:
    """Return copies of every rank's object, on every rank; pickled, see `broadcast_object`.

    Parameters
    ----------
    obj : object

    Returns
    -------
    list
        In rank order.

    Raises
    ------
    TypeError
        This rank cannot pickle its object or unpickle another one; the others then raise CollectiveMismatch.
    CollectiveMismatch, CollectiveTimeout, PeerFailure

    Examples
    --------
    >>> import mpicomp
    >>> mpicomp.run_local(2, lambda comm: comm.allgather_object({"rank": comm.rank}))[0]
    [{'rank': 0}, {'rank': 1}]
    """
    name = "allgather_object()"
    with comm.observe("allgather_object"):
        payload = _pickle(comm, obj, name)
        call = Call(comm, lambda: name)
        call.remake = lambda: _all_gather(call, comm.check(call, fingerprint(name)), payload)
        return _unpickle(comm, comm.run(call, call.remake()), name)


def _broadcast(comm: Group, call: Call, name: str, payload: Bytes, root: int) -> Steps:
    yield from comm.check(call, fingerprint(name))  # made here, as the ranks may regroup before this step
    size = np.array([payload.size], np.int64)
    yield from broadcast_payload(call, size.view(np.uint8), root)
    call.result = payload if payload.size else np.empty(size[0], np.uint8)
    yield from broadcast_payload(call, call.result, root)


def _all_gather(call: Call, check: Steps, payload: Bytes) -> Steps:
    yield from check
    sizes = yield from gather_sizes(call, payload.size)
    landing = np.empty(sizes.sum(), np.uint8)
    yield from gather_payloads(call, payload, sizes, landing)
    call.result = np.split(landing, np.cumsum(sizes)[:-1])


def _pickle(comm: Group, obj: object, name: str) -> Bytes:
    """Return the object's bytes, read-only; raises on every rank if it cannot be pickled."""
    try:
        return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:  # objects define how they are pickled
        if is_of_handler(error):
            raise
        problem = f"a {type(obj).__name__} cannot be pickled ({type(error).__name__}: {one_line(error)})"
        _refuse(comm, name, f"{problem}; send plain data that it can be made of", TypeError)


def _unpickle(comm: Group, payloads: list[Bytes], name: str) -> list[Any]:
    """Return the objects; raises on every rank if one rank cannot make them."""
    read = f"{name}, unpickled"
    try:
        objects = [pickle.loads(payload.data) for payload in payloads]
    except Exception as error:  # of modules that are missing here, and of any code that objects run
        if is_of_handler(error):
            raise
        problem = f"an object cannot be unpickled here ({type(error).__name__}: {one_line(error)})"
        cure = "every rank must have the modules that define it"
        comm.reject(TypeError(f"{comm.here}, {name}: {problem}; {cure}"), read)
    comm.agree(fingerprint(read), lambda: read)
    return objects


# Numbers --------------------------------------------------------------------------------------------------------------


def allreduce_number(comm: Group, number: object, op: str, out: object, traffic: Traffic) -> bool | int | float:
    """Reduce a number, which travels with the check of the call over any topology."""
    name = f"allreduce({op})"
    if out is not None:
        _refuse(comm, name, "a number is returned, not written to out", TypeError)
    kind = _kind_of_number(number)
    if kind is None:
        _refuse(comm, name, f"cannot reduce {type(number).__name__}: pass a bool, an int or a float", TypeError)
    given: Any = number
    text = f"{name} of a number of type {kind.__name__}"
    values = np.array([float(given)]) if kind is float else _pack_integer(comm, int(given), op, name)
    call, result, ranks = Call(comm, lambda: text, traffic.clock), values.copy(), 0

    def steps() -> Steps:
        nonlocal ranks
        ranks = comm.size  # which may be smaller at the end of the call
        return comm.check(call, fingerprint(text), traffic, values, result, combine=COMBINE[op])

    call.remake = steps
    with comm.observe("allreduce", op=op):
        comm.run(call, steps())
    traffic.calls += 1
    if op == "mean":
        return float(result.item() / ranks)
    return int(result.item()) if op == "sum" and kind is bool else kind(result.item())


def _kind_of_number(number: object) -> type[bool] | type[int] | type[float] | None:
    """Return Python's type of Python's and NumPy's numbers; None for other scalars of NumPy."""
    if isinstance(number, bool | np.bool_):
        return bool
    if isinstance(number, int | np.integer):
        return int
    return float if isinstance(number, float | np.floating) else None


def _pack_integer(comm: Group, number: int, op: str, name: str) -> Indices:
    """Return an integer as it travels, in 64 bits; rejects one whose sum may have more."""
    most = _MOST // comm.size if op in ("sum", "mean") else _MOST
    if abs(number) > most:
        problem = f"the integer {shown(number)} is beyond {most}, so that 64 bits may not hold the result"
        _refuse(comm, name, f"{problem}; pass a float")
    return np.array([number], np.int64)
