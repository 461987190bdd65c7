"""Python objects from rank to rank, pickled: for settings, names and records, not for large arrays.

Unpickling runs code that the sender chose, and the sender is always a rank of the same communicator.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from collectives.annotations import Bytes
from collectives.consistency.call_check import fingerprint
from collectives.dense.broadcast_gather import broadcast_payload, gather_payloads, gather_sizes
from collectives.execution.handle import Call, Steps
from collectives.group import Group
from collectives.json_file import one_line


def broadcast_object(group: Group, obj: Any, root: int) -> Any:
    """See `Communicator.broadcast_object`; there is a rank `root`."""
    name = f"broadcast_object(root={root})"
    payload = _pickled(group, obj, name) if group.rank == root else np.empty(0, np.uint8)
    call = Call(group, lambda: name)
    landed = group.run(call, _broadcast(call, group.check(call, fingerprint(name)), payload, root))
    objects = _unpickled(group, [] if group.rank == root else [landed], name)
    return objects[0] if objects else obj


def all_gather_object(group: Group, obj: Any) -> list[Any]:
    """See `Communicator.allgather_object`."""
    name = "allgather_object()"
    payload = _pickled(group, obj, name)
    call = Call(group, lambda: name)
    return _unpickled(group, group.run(call, _all_gather(call, group.check(call, fingerprint(name)), payload)), name)


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


def _pickled(group: Group, obj: Any, name: str) -> Bytes:
    """The object's bytes, read-only; raises on every rank if there are none."""
    try:
        return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:  # noqa: BLE001 - objects say themselves how they are pickled
        told = f"a {type(obj).__name__} cannot be pickled ({type(error).__name__}: {one_line(error)})"
        group.reject(TypeError(f"{group.here}, {name}: {told}; send plain data that it can be made of"), name)


def _unpickled(group: Group, payloads: list[Bytes], name: str) -> list[Any]:
    """The objects; raises on every rank if one rank cannot make them."""
    read = f"{name}, unpickled"
    try:
        objects = [pickle.loads(payload.data) for payload in payloads]
    except Exception as error:  # noqa: BLE001 - of modules that are missing here, and of any code that objects run
        told = f"an object cannot be unpickled here ({type(error).__name__}: {one_line(error)})"
        group.reject(TypeError(f"{group.here}, {name}: {told}; every rank must have the modules that define it"), read)
    group.agree(fingerprint(read), lambda: read)
    return objects
