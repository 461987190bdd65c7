"""Objects that ranks exchange, pickled: settings, names and records, not large arrays.

Unpickling runs code that the sender chose, and the sender is always a rank of the same communicator.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collectives.annotations import Bytes
from collectives.communicator.operands import refuse_call, require_root
from collectives.consistency.descriptions import fingerprint
from collectives.dense.broadcast_gather import broadcast_payload, gather_payloads, gather_sizes
from collectives.errors import is_of_handler
from collectives.execution.call import Call, Steps
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import one_line

if TYPE_CHECKING:
    from collectives.group.group import Group

_Object = TypeVar("_Object")


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
        refuse_call(comm, name, f"{problem}; send plain data that it can be made of", TypeError)


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
