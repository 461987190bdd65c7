"""Splitting a communicator by colour: the agreement before it, and MPI's part."""

from __future__ import annotations

from operator import index

from mpi4py import MPI

from collectives.consistency.call_check import fingerprint
from collectives.execution.handle import Call, Steps
from collectives.group import Group

_MOST = 2**31 - 1


def split(group: Group, color: int | None, key: int) -> MPI.Comm | None:
    """MPI's communicator of the ranks with this colour; None for no colour. See `Communicator.split`."""
    name = "split()"
    try:
        chosen = MPI.UNDEFINED if color is None else _within("color", color, 0)
        place = _within("key", key, -_MOST)
    except (TypeError, ValueError) as error:
        group.reject(type(error)(f"{group.here}, {name}: {error}"), name)
    call = Call(group, lambda: name)
    part: MPI.Comm = group.run(call, _steps(group, call, group.check(call, fingerprint(name)), chosen, place))
    return None if color is None else part


def _steps(group: Group, call: Call, check: Steps, color: int, key: int) -> Steps:
    yield from check
    yield from group.turn_of(call)
    # MPI splits in a call that waits for all: none is to wait there for a rank that does not come
    missing = f"{group.here}: not all ranks come to split the communicator"
    yield from group.await_request(call, group.mpi_comm.Ibarrier(), lambda: missing)
    call.result = group.mpi_comm.Split(color, key)


def _within(name: str, value: int, least: int) -> int:
    """An argument, which must be an integer from `least` to 2^31 - 1."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not least <= number <= _MOST:
        raise ValueError(f"{name} must lie in {least} .. {_MOST}, not {number}")
    return number
