"""Collectives that move arrays and objects or reduce numbers: broadcast, gathering and barrier.

Objects are pickled: settings, names and records, not large arrays. Unpickling runs code that the sender chose, and the
sender is always a rank of the same communicator.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.annotations import Array, Bytes, Indices
from collectives.arrays.elements import COMBINE, COPIED
from collectives.communicator.operands import require_root, rows_operand, writable_operand
from collectives.communicator.routes import Routes
from collectives.consistency.call_check import fingerprint
from collectives.dense.broadcast_gather import (
    all_gather_rows,
    broadcast_chain,
    broadcast_payload,
    broadcast_steps,
    gather_payloads,
    gather_sizes,
    is_long,
)
from collectives.execution.handle import Call, Steps
from collectives.execution.staged import staged
from collectives.quoting import one_line, shown
from collectives.trace.traffic import Traffic

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator

NUMBERS = (int, float, np.generic)  # as few as will do, since every all-reduce of an array compares its argument
_MOST = 2**63 - 1


# Arrays ---------------------------------------------------------------------------------------------------------------


def broadcast_array(group: Communicator, routes: Routes, x: Array, root: int) -> Array:
    """Overwrite `x` with rank `root`'s, and return it."""
    name = f"broadcast(root={root})"
    vector = writable_operand(group, x, name, COPIED)
    text = f"{name} of {vector.dtype}{list(vector.shape)}"
    require_root(group, root, text)
    nbytes = vector.values.nbytes
    call = Call(group, lambda: text)
    call.is_compared = is_long(vector)

    def check(ready: Indices | None) -> Steps:
        return group.check(call, fingerprint(text), None, ready, ready)

    with group.span("broadcast", root=root, bytes=nbytes):
        program = partial(routes.program, broadcast_chain(nbytes, root), nbytes, 64, nbytes)
        group.run(call, broadcast_steps(call, vector, root, check, program))
    return x


def all_gather_array(group: Communicator, x: Array) -> Array:
    """Return the rows of all ranks in one new array."""
    rows = rows_operand(group, x, "allgather", COPIED)
    text = f"allgather of rows of {rows.dtype}{list(rows.shape[1:])}"
    call = Call(group, lambda: text)
    with group.span("allgather", bytes=rows.values.nbytes):
        steps = all_gather_rows(call, group.check(call, fingerprint(text)), x, rows)
        return group.run(call, staged(call, steps, rows.staging, None))


def barrier(group: Communicator) -> None:
    """Wait until every rank is here."""
    call = Call(group, lambda: "barrier()")
    with group.span("barrier"):
        group.run(call, _barrier(group, call, group.check(call, fingerprint("barrier"))))


def _barrier(group: Communicator, call: Call, check: Steps) -> Steps:
    yield from check
    if group.size > 1:
        yield from group.turn_of(call)
        missing = f"{group.here}: not all ranks reach the barrier"
        yield from group.await_request(call, group.mpi_comm.Ibarrier(), lambda: missing)


# Objects --------------------------------------------------------------------------------------------------------------


def broadcast_object(group: Communicator, obj: object, root: int) -> object:
    """Return rank `root`'s object."""
    require_root(group, root, f"broadcast_object(root={root})")
    name = f"broadcast_object(root={root})"
    with group.span("broadcast_object", root=root):
        payload = _pickled(group, obj, name) if group.rank == root else np.empty(0, np.uint8)
        call = Call(group, lambda: name)
        landed = group.run(call, _broadcast(call, group.check(call, fingerprint(name)), payload, root))
        objects = _unpickled(group, [] if group.rank == root else [landed], name)
    return objects[0] if objects else obj


def all_gather_object(group: Communicator, obj: object) -> list[Any]:
    """Return every rank's object, in rank order."""
    name = "allgather_object()"
    with group.span("allgather_object"):
        payload = _pickled(group, obj, name)
        call = Call(group, lambda: name)
        steps = _all_gather(call, group.check(call, fingerprint(name)), payload)
        return _unpickled(group, group.run(call, steps), name)


def _broadcast(call: Call, check: Steps, payload: Bytes, root: int) -> Steps:
    yield from check
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


def _pickled(group: Communicator, obj: object, name: str) -> Bytes:
    """Return the object's bytes, read-only; raises on every rank if it cannot be pickled."""
    try:
        return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:  # noqa: BLE001 - objects define how they are pickled
        problem = f"a {type(obj).__name__} cannot be pickled ({type(error).__name__}: {one_line(error)})"
        group.reject(TypeError(f"{group.here}, {name}: {problem}; send plain data that it can be made of"), name)


def _unpickled(group: Communicator, payloads: list[Bytes], name: str) -> list[Any]:
    """Return the objects; raises on every rank if one rank cannot make them."""
    read = f"{name}, unpickled"
    try:
        objects = [pickle.loads(payload.data) for payload in payloads]
    except Exception as error:  # noqa: BLE001 - of modules that are missing here, and of any code that objects run
        problem = f"an object cannot be unpickled here ({type(error).__name__}: {one_line(error)})"
        cure = "every rank must have the modules that define it"
        group.reject(TypeError(f"{group.here}, {name}: {problem}; {cure}"), read)
    group.agree(fingerprint(read), lambda: read)
    return objects


# Numbers --------------------------------------------------------------------------------------------------------------


def allreduce_number(group: Communicator, number: object, op: str, out: object, traffic: Traffic) -> bool | int | float:
    """Reduce a number, which travels with the check of the call over any topology."""
    name = f"allreduce({op})"
    if out is not None:
        group.reject(TypeError(f"{group.here}, {name}: a number is returned, not written to out"), name)
    kind = _kind(number)
    if kind is None:
        problem = f"cannot reduce {type(number).__name__}: pass a bool, an int or a float"
        group.reject(TypeError(f"{group.here}, {name}: {problem}"), name)
    given: Any = number
    text = f"{name} of a number of type {kind.__name__}"
    values = np.array([float(given)]) if kind is float else _integer(group, int(given), op, name)
    call, result = Call(group, lambda: text, traffic.clock), values.copy()
    with group.span("allreduce", op=op):
        group.run(call, group.check(call, fingerprint(text), traffic, values, result, combine=COMBINE[op]))
    traffic.calls += 1
    if op == "mean":
        return float(result.item() / group.size)
    return int(result.item()) if op == "sum" and kind is bool else kind(result.item())


def _kind(number: object) -> type[bool] | type[int] | type[float] | None:
    """Return Python's type of Python's and NumPy's numbers; None for other scalars of NumPy."""
    if isinstance(number, bool | np.bool_):
        return bool
    if isinstance(number, int | np.integer):
        return int
    return float if isinstance(number, float | np.floating) else None


def _integer(group: Communicator, number: int, op: str, name: str) -> Indices:
    """Return an integer as it travels, in 64 bits; rejects one whose sum may have more."""
    most = _MOST // group.size if op in ("sum", "mean") else _MOST
    if abs(number) > most:
        problem = f"the integer {shown(number)} is beyond {most}, so that 64 bits may not hold the result"
        group.reject(ValueError(f"{group.here}, {name}: {problem}; pass a float"), name)
    return np.array([number], np.int64)
