"""Collectives that move arrays, wait for all ranks, or reduce numbers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.annotations import Indices, Kept
from collectives.arrays.elements import COMBINE, COPIED
from collectives.arrays.vectors import is_read_only
from collectives.communicator.operands import allocate_like, refuse_call, require_root, validate_array
from collectives.consistency.descriptions import fingerprint
from collectives.dense.broadcast_gather import all_gather_rows, broadcast_chain, broadcast_steps, is_long
from collectives.execution.call import Call, Steps
from collectives.execution.staged import stage
from collectives.execution.traffic import Traffic
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import shown

if TYPE_CHECKING:
    from collectives.group.group import Group

_MOST = 2**63 - 1


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
    vector = validate_array(comm, x, name, COPIED, verb="broadcast")
    if is_read_only(vector, x):
        refuse_call(comm, name, "the array is read-only; pass one that can be written")
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
    rows = validate_array(comm, x, "allgather", COPIED, verb="gather")
    if not rows.shape:
        refuse_call(comm, "allgather", "an array without dimensions has no rows; pass x.reshape(1)")
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


# Numbers --------------------------------------------------------------------------------------------------------------


def allreduce_number(comm: Group, number: object, op: str, out: object, traffic: Traffic) -> bool | int | float:
    """Reduce a number, which travels with the check of the call over any topology."""
    name = f"allreduce({op})"
    if out is not None:
        refuse_call(comm, name, "a number is returned, not written to out", TypeError)
    kind = _kind_of_number(number)
    if kind is None:
        refuse_call(comm, name, f"cannot reduce {type(number).__name__}: pass a bool, an int or a float", TypeError)
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
        refuse_call(comm, name, f"{problem}; pass a float")
    return np.array([number], np.int64)
