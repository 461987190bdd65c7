"""Layer of arrays on devices: copies to the host and back, and work of a step that the next step waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.annotations import Testable
from collectives.arrays import Staging
from collectives.arrays.vectors import Flat
from collectives.dense.device_sum import are_on_one_device, settled_before
from collectives.execution.call import Steps
from collectives.execution.staged import await_operation, deliver, fetch, run_before_arrival, use_in_background


class LastWork:
    """Work of an aggregator's last step on a device, for which the host has not waited."""

    queued: Testable | None = None


class StagedCall:
    """Layer of one call, of which an array is on a device.

    Parameters
    ----------
    last : LastWork
    source, target : Flat
        The vector and the result.
    array_steps : callable or None
        As in `mpicomp.aggregator.parts.Driver`.
    """

    def __init__(self, last: LastWork, source: Flat, target: Flat, array_steps: Callable[..., Steps] | None) -> None:
        self._last, self._source, self._target = last, source, target
        self._device = None if source.place is None else source.place.device
        # of a method that reads the vector and writes the result on their common device, without a copy
        self._array_steps = array_steps if array_steps and are_on_one_device(source, target) else None

    def arrive(self, call: Any) -> Steps:
        """Prepare the vector before the ranks compare the call."""
        device = self._device
        if device is not None:
            use_in_background(call, device)
            queued, self._last.queued = self._last.queued, None
            if queued is not None:  # copies of it read memory that this step overwrites
                problem = f"{device.name} does not end the step before"
                yield from run_before_arrival(call, await_operation(call, lambda: queued, problem))
        if self._array_steps is not None:
            yield from settled_before(call, self._source, call.group.size)
        elif isinstance(self._source.place, Staging):
            yield from fetch(call, self._source.place)

    def around(self, call: Any, steps: Callable[[Any], Steps]) -> Steps:
        """Return the steps of the call, after which the result is copied to its device."""
        try:
            if self._array_steps is not None:
                yield from self._array_steps(call, self._source, self._target)
                return
            yield from steps(call)
            if isinstance(self._target.place, Staging):
                yield from deliver(call, self._target.place)
        finally:
            if self._device is not None:
                self._last.queued = call.queued
