"""Work on parts of a vector that do not need each other: done by the communicator's workers, if it has any."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from collectives.annotations import Testable
from collectives.execution.handle import Call, Steps
from collectives.execution.workers import Jobs, Work, Workers, worker_number
from collectives.progress.polling import until
from collectives.trace.recorder import Trace
from collectives.trace.traffic import Traffic

_KINDS = {"seconds_encoding": "encode", "seconds_decoding": "decode"}


def in_parts(
    call: Call,
    traffic: Traffic,
    phase: str,
    work: Work,
    parts: Iterable[Any],
    workers: Workers | None,
    messages: bool = False,
) -> Steps:
    """Call `work` with each part, as part of a call.

    Parameters
    ----------
    call : Call
    traffic : Traffic
    phase : "seconds_encoding" or "seconds_decoding"
        As whose seconds those of `work` count.
    work : callable
    parts : iterable
    workers : Workers or None
        Who works, several parts at a time. None: the thread that makes the call does, which pays for short vectors.
    messages : bool
        Whether the call has messages on their way meanwhile.
    """
    trace = call.group.trace
    if trace is not None:
        work = partial(_recorded, trace, _KINDS[phase], work)
    if workers is None:
        yield from _one_by_one(call, traffic, phase, work, parts)
        return
    jobs, waiting, under_way = Jobs(workers, traffic), deque(parts), [0]

    def ended() -> None:
        under_way[0] -= 1

    try:
        while waiting or under_way[0]:
            moved = jobs.collect()
            if waiting and not jobs.all_busy:
                under_way[0] += 1
                jobs.do(phase, ended, work, waiting.popleft())
                moved = True
            if not moved:
                call.rest_meanwhile = partial(jobs.rest, messages)
            yield moved
    finally:
        call.rest_meanwhile = None
        jobs.end()
    call.moved()
    call.waited_s -= jobs.rested_s  # this process computed meanwhile


def _one_by_one(call: Call, traffic: Traffic, phase: str, work: Work, parts: Iterable[Any]) -> Steps:
    """The calling thread alone, which takes short vectors a few microseconds."""
    clock = traffic.clock
    for part in parts:
        start = clock()
        on_device = work(part)
        setattr(traffic, phase, getattr(traffic, phase) + clock() - start)
        if on_device is not None:
            yield from until(on_device, call)
        yield True


def _recorded(trace: Trace, kind: str, work: Work, part: Any) -> Testable | None:
    start = trace.clock()
    on_device = work(part)
    end, worker = trace.clock(), worker_number()
    label = {"piece": 0, "worker": worker} if worker else {"piece": 0}
    trace.add((kind, "", start, end, label, trace.program, 0))
    return on_device
