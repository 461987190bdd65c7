"""Calls of arrays on devices: what they read is copied to the host before, and what they write is copied back after."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from collectives.annotations import Testable
from collectives.arrays import Device, Staging
from collectives.arrays.gpu_mpi import verdict
from collectives.execution.handle import Call, Steps
from collectives.progress.polling import done

_Found = TypeVar("_Found")


def staged(call: Call, steps: Steps, source: Staging | None, target: Staging | None) -> Steps:
    """Steps of a call between copying what it reads from a device and copying what it has written to one."""
    return steps if source is target is None else _staged(call, steps, source, target)


def _staged(call: Call, steps: Steps, source: Staging | None, target: Staging | None) -> Steps:
    if source is not None:
        yield from fetch(call, source)
    yield from steps
    if target is not None:
        yield from deliver(call, target)


def fetch(call: Call, source: Staging) -> Steps:
    """Copy an array to the host, at the beginning of a call."""
    yield from late(call, _copied(call, source.device, source.fetch, "from"))


def deliver(call: Call, target: Staging) -> Generator[bool, None, None]:
    """Copy what a call has made of an array back to its device."""
    return _copied(call, target.device, target.deliver, "to")


def use_in_background(call: Call, device: Device) -> None:
    """Let the progress thread work with a device: it would hold memory on the first one beside."""
    if call.completion is not None:
        device.use()


def _copied(call: Call, device: Device, begin: Callable[[], Testable | None], way: str) -> Generator[bool, None, None]:
    use_in_background(call, device)
    yield from awaited(call, begin, f"the copy {way} {device.name} does not end, or the device does not come to it")


def late(call: Call, steps: Generator[bool, None, _Found]) -> Generator[bool, None, _Found]:
    """Steps at the beginning of a call before this rank comes to it: it keeps its place among the calls meanwhile."""
    call.group.enter(call)  # in the order of calls, however long the device takes
    arrival, call.arrival = call.arrival, 0  # this rank still computes: it comes late to the call
    found = yield from steps
    call.arrival = arrival
    return found


def awaited(call: Call, begin: Callable[[], Testable | None], problem: str) -> Generator[bool, None, None]:
    """Begin something and wait for it, as part of a call; `problem` is what to say where it does not end."""
    describe, here = call.describe, call.group.here
    call.describe = lambda: f"{here}: {problem}; {call.name()}"
    yield from done(call, begin())
    call.describe = describe


def takes_device_memory(call: Call, device: str) -> Generator[bool, None, bool]:
    """Find out whether a call may hand memory of a device, such as ``"cuda:1"``, to MPI; probe MPI if need be."""
    if not verdict.carries(call.group.mpi_comm):
        return False
    if verdict.verdict.outcome is None and (probe := verdict.verdict.begin(device)) is not None:
        yield from awaited(call, lambda: probe, f"the probe of MPI with memory of {device} does not end")
    return verdict.verdict.end().works
