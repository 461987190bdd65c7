"""Dense sums of arrays on devices: which of them are added there, and by which way their messages go.

Each rank decides for itself: messages are the same bytes in either case, and only their memory is another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from collectives.arrays.vectors import Flat
from collectives.dense.device_payload import DevicePayload
from collectives.execution.handle import Call, Steps
from collectives.execution.pipelined import execute
from collectives.execution.program import Program
from collectives.execution.staged import awaited, late, takes_device_memory, use_in_background
from collectives.trace.traffic import Traffic

# Vectors below this, in bytes of their messages, go through the host as a whole: one copy each way, where the way by
# pieces has up to three, and kernels for each. As long as what "auto" sums by the ring; no GPU has confirmed it.
STAGED_BYTES = 4 << 20
DIRECT_BYTES = 64 << 10  # the same where MPI reads the device's memory: then there are no copies to be spared


def are_on_one_device(source: Flat, target: Flat) -> bool:
    """Whether an array and its result are."""
    here, there = source.staging, target.staging
    return here is not None and there is not None and here.device is there.device


def settled_before(call: Call, source: Flat, ranks: int) -> Steps:
    """Steps before the ranks agree on the mean of an array on a device: it is made, and MPI is probed if it will be."""
    assert source.staging is not None
    device = source.staging.device
    yield from late(call, awaited(call, device.done, f"{device.name} does not come to the array"))
    if ranks > 1 and source.values.nbytes >= DIRECT_BYTES:
        yield from late(call, takes_device_memory(call, device.name))


def copied_on_device(call: Call, source: Flat, target: Flat, check: Steps) -> Steps:
    """Steps of a sum of a single rank."""
    here, there = source.staging, target.staging
    assert here is not None
    assert there is not None
    yield from check
    here.device.run(lambda: there.vector.copy_(here.vector))
    yield from awaited(call, here.device.done, f"{here.device.name} does not come to the array")


def sum_on_device(
    call: Call,
    program: Program,
    nbytes: int,
    source: Flat,
    target: Flat,
    op: str,
    traffic: Traffic,
    check: Steps,
    through_host: Callable[[], Steps],
    overlapped: bool,
) -> Steps:
    """Steps of a sum of vectors on one device, by the program of the other ranks.

    Parameters
    ----------
    call : Call
    program : Program
        Of two ranks or more.
    nbytes : int
        Of the whole vector in messages.
    source, target : Flat
        `target` is overwritten.
    op : str
    traffic : Traffic
        Counted into.
    check : Steps
        In which the ranks compare the call.
    through_host : callable
        Makes the sum in the host's memory with all that belongs to it, for short vectors, and where memory is missing.
    overlapped : bool
        The program runs with other calls.
    """
    here, there = source.staging, target.staging
    assert here is not None
    assert there is not None
    device = here.device
    use_in_background(call, device)  # it takes memory
    payload = None
    direct = nbytes >= DIRECT_BYTES and (yield from late(call, takes_device_memory(call, device.name)))
    if direct or nbytes >= STAGED_BYTES:
        with suppress(RuntimeError):  # PyTorch's, for want of memory
            payload = DevicePayload(program, device, here.vector, source.dtype, op, there.vector, direct)
    if payload is None:
        yield from through_host()
        return
    use_in_background(call, device)  # it calls MPI, and other calls may have used another device since
    # whoever makes the array, or has used the memory of the result
    yield from late(call, awaited(call, device.done, f"{device.name} does not come to the array"))
    yield from check
    yield from execute(call, program, payload, call.tag, traffic, overlapped=overlapped)
