"""Staging of calls with arrays on devices: inputs are copied to the host first, and results are copied back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from collectives.annotations import Testable
from collectives.arrays import Device, Queued, Staging
from collectives.arrays.gpu_mpi import verdict
from collectives.execution.call import Call, Steps
from collectives.progress.polling import done

_Found = TypeVar("_Found")


def stage(call: Call, steps: Steps, source: Staging | None, target: Staging | None) -> Steps:
    """Return the steps of a call whose input comes from a device first, and whose result goes to one last."""
    return steps if source is target is None else _stage(call, steps, source, target)


def _stage(call: Call, steps: Steps, source: Staging | None, target: Staging | None) -> Steps:
    if source is not None:
        yield from fetch(call, source)
    yield from steps
    if target is not None:
        yield from deliver(call, target)


def fetch(call: Call, source: Staging) -> Steps:
    """Copy an array to the host, at the beginning of a call."""
    yield from run_before_arrival(call, _copy(call, source.device, source.fetch, "from"))


def deliver(call: Call, target: Staging) -> Generator[bool, None, None]:
    """Copy the result of a call to its device."""
    return _copy(call, target.device, target.deliver, "to")


def until_queued(call: Call, last: Testable | None) -> Steps:
    """Wait for the last work of a call on a device, unless the caller has named a stream that waits for it instead.

    Nothing that follows in the call may overwrite memory that this work reads; the next call waits for ``call.queued``.
    """
    if not isinstance(last, Queued):
        yield from done(call, last)
        return
    while not (call.stream is not None or last.Test()):  # the caller may name a stream at any time
        yield False
    call.moved()
    leave_queued(call, last)


def leave_queued(call: Call, last: Queued) -> None:
    """Note the work of a device that a stream waits for, if the caller has named one."""
    if call.stream is not None:
        call.queued = last.device.done()  # behind all work of the call, on the streams of copies too


def use_in_background(call: Call, device: Device) -> None:
    """Make a device the current one of the progress thread, if this thread drives the call."""
    # Otherwise PyTorch would make the first device current, and reserve memory there too.
    if call.completion is not None:
        device.use()


def _copy(call: Call, device: Device, begin: Callable[[], Testable | None], way: str) -> Generator[bool, None, None]:
    use_in_background(call, device)
    problem = f"the copy {way} {device.name} does not end, or the device does not come to it"
    yield from await_operation(call, begin, problem, is_last=way == "to")


def run_before_arrival(call: Call, steps: Generator[bool, None, _Found]) -> Generator[bool, None, _Found]:
    """Run steps before this rank comes to a call; the call keeps its place in the order of calls meanwhile."""
    call.group.enter(call)  # first, since other calls may begin while the device works
    arrival, call.arrival = call.arrival, 0  # this rank still computes, and other ranks may take as long to come
    found = yield from steps
    call.arrival = arrival
    return found


def await_operation(
    call: Call, begin: Callable[[], Testable | None], problem: str, is_last: bool = False
) -> Generator[bool, None, None]:
    """Begin an operation and wait for it, as part of a call; `problem` describes it if it does not end.

    The last operation of a call is waited for by `until_queued`.
    """
    describe, here = call.describe, call.group.here
    call.describe = lambda: f"{here}: {problem}; {call.name()}"
    operation = begin()
    yield from until_queued(call, operation) if is_last else done(call, operation)
    call.describe = describe


def await_array(call: Call, device: Device) -> Steps:
    """Wait until a device has computed the array of a call, before this rank comes to the call."""
    problem = f"{device.name} does not come to the array"
    yield from run_before_arrival(call, await_operation(call, device.done, problem))


def takes_device_memory(call: Call, device: str) -> Generator[bool, None, bool]:
    """Find out whether a call may pass memory of a device, such as ``"cuda:1"``, to MPI; probe MPI if need be."""
    return (yield from run_before_arrival(call, _probe(call, device)))


def _probe(call: Call, device: str) -> Generator[bool, None, bool]:
    if not verdict.carries(call.group.mpi_comm):
        return False
    if verdict.verdict.outcome is None and (probe := verdict.verdict.begin(device)) is not None:
        yield from await_operation(call, lambda: probe, f"the probe of MPI with memory of {device} does not end")
    return verdict.verdict.end().works
