"""Work on parts of a vector that do not need each other: done by the communicator's workers, if it has any."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from collectives.execution.handle import Call, Steps
from collectives.execution.workers import Jobs, Work
from collectives.trace.traffic import Traffic


def in_parts(call: Call, traffic: Traffic, phase: str, work: Work, parts: Iterable[Any]) -> Steps:
    """Call `work` with each part, as part of a call; its seconds count as those of a phase.

    What `work` returns, if it is not None, tells when a device has done its part.
    """
    start = traffic.clock()
    jobs, waiting, under_way = Jobs(call.group.workers, traffic), deque(parts), [0]

    def ended() -> None:
        under_way[0] -= 1

    if not jobs.at_once:
        call.rest_meanwhile = lambda: jobs.rest(messages=False)
    try:
        while waiting or under_way[0]:
            moved = jobs.collect()
            if waiting and not jobs.all_busy:
                under_way[0] += 1
                jobs.do(phase, ended, work, waiting.popleft())
                moved = True
            yield moved
    finally:
        call.rest_meanwhile = None
        jobs.end()
    call.moved()
    traffic.seconds_total += traffic.clock() - start
