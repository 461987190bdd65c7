"""Driver that chooses the faster of two: the exact mean, or a method that compresses.

The method starts with fresh state whenever it is chosen. The dense step that leaves it averages the vectors plus all
pending errors, after which no error is pending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.annotations import AnyArray, Array, override
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Driver, Feedback, Parts, State, StateKind, VectorSpec
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.step import StepDriver
from mpicomp.auto.trials import COUNT, Front, Schedule, Side, Stage, Stopwatch, TrialPlan, TrialTimes, slowest
from mpicomp.feedback.base import NoFeedback
from mpicomp.reducers.full_precision_mean import FullPrecisionMean
from mpicomp.spaces import Space
from mpicomp.spaces.mirror import Mirror

_log = logging.getLogger("mpicomp")
KEY = "auto"  # key of the plan in a state, next to the method's entries


class Pending:
    """Errors that a method has yet to contribute to the mean. `space` has the vectors."""

    def __init__(self, feedback: Feedback, ranks: int, space: Space) -> None:
        self._feedback, self._ranks, self._space = feedback, ranks, space
        self._crossed: Mirror | None = None  # keeps the memory alive that the device copies in the background
        self._kinds, self._pending_keys = feedback.state_kinds, feedback.pending_keys
        # entries of zeros, such as residuals, take no memory here
        self._fresh = {key: one for key, one in feedback.state().items() if np.any(one)}

    def added_to(self, values: Array) -> Array:
        """Return the sum of a vector and this rank's pending errors, or the vector itself if no error is pending.

        For vectors on a device the sum is computed there; this waits until the errors are in the host's memory.
        """
        total: AnyArray | None = None
        for key, array in self._feedback.state().items():
            if key in self._pending_keys and array.shape == values.shape:
                # only the owner has the error of an element; the mean divides it by the number of ranks
                holders = self._ranks if self._kinds[key] == "owner" else 1
                if (factor := holders * self._feedback.pending_factor) != 1:
                    array *= array.dtype.type(factor)
                total = array if total is None else np.add(total, array, out=total)
        if total is None:
            return values
        if self._space.is_host:
            return np.add(total, values, out=total)
        self._crossed = self._space.sent(total)
        self._space.launch(self._crossed.there.add_, values)
        return self._crossed.there

    def reset_method(self) -> None:
        """Reset the method: forget pending errors and all other state."""
        self._crossed = None
        nothing = {key: np.zeros_like(array) for key, array in self._feedback.like().items()}
        # with the step the plan of `Auto` is checked
        self._feedback.load({"step": np.zeros((), np.int64)} | nothing | self._fresh)


class Chosen(Driver):
    """Steps by the driver that is chosen or on trial: the exact mean's, or `compressing` with `pending` errors.

    While `compressed` is true, the method made the last step, so errors may be pending.
    """

    def __init__(
        self,
        comm: Communicator,
        spec: VectorSpec,
        pending: Pending,
        compressing: Driver,
        mean: FullPrecisionMean,
        schedule: Schedule,
        name: str,
    ) -> None:
        self.ranks, self._logs = comm.size, comm.rank == 0
        self._pending, self._compressing, self._mean = pending, compressing, mean
        dense = self._dense = StepDriver(comm, Parts(NoFeedback(), mean, mean), lambda step: True)
        self._schedule = schedule if comm.size > 1 else replace(schedule, retry_every=None)
        self._spec, self._name = spec, name
        self._channel = SideChannel(comm, COUNT)
        self._watch = Stopwatch(comm.users.common(Front))
        self._running: Driver = dense
        self._clock: Callable[[], float] | None = None  # clock of a step that is being measured
        self._clears = False
        self._quiet_until = 0  # before this step the last driver goes on, and times are not measured
        self._settled = dense.steps
        self._was_settled = False  # the last step was one of the chosen driver alone
        self.plan = self._next = self.first_plan(0)
        self.compressed = False

    def first_plan(self, step: int) -> TrialPlan:
        """Return the plan of a vector without measured times; a single rank sends nothing and has no choice."""
        return TrialPlan(Stage.BRIEF if self.ranks > 1 else Stage.CHOSEN, step)

    def load(self, plan: TrialPlan, compressed: bool) -> None:
        """Continue from another state."""
        self._watch.clear()
        self._take(plan, compressed)

    @override
    def prepare(self, step: int) -> None:
        plan, schedule = self.plan, self._schedule
        if step < schedule.end(plan) and schedule.place(plan, step).side is Side.COMPRESSED:
            self._compressing.prepare(step)

    @override
    def compares(self, step: int) -> bool:
        return step < self._quiet_until and self._running.compares(step)

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        self._was_settled = call.step < self._quiet_until
        return self._settled(call) if self._was_settled else self._measured(call)

    @property
    @override
    def can_undo(self) -> bool:
        return self._was_settled and self._running.can_undo  # a measured step may have changed the plan

    @override
    def undo(self) -> None:
        self._running.undo()

    @override
    def commit(self) -> None:
        self._running.commit()
        if self._clock is None:
            return
        self._watch.end(self._clock())
        self._clock = None
        if self._clears:
            self._pending.reset_method()
        if self._next is not self.plan:
            self._watch.clear()
        # a dense step that was skipped leaves the errors pending
        compressed = self._running is self._compressing or (self.compressed and not self._clears)
        self._take(self._next, compressed)

    @override
    def roll_back(self) -> None:
        self._running.roll_back()
        self._watch.fail()
        self._clock = None

    def _take(self, plan: TrialPlan, compressed: bool) -> None:
        """Adopt the plan of a completed step, which the method has made or not."""
        self.plan, self.compressed = plan, compressed
        goes_on = compressed == (plan.side is Side.COMPRESSED)
        self._quiet_until = self._schedule.quiet_until(plan) if goes_on else 0
        self._listen()
        # short steps must not pay for this class: the chosen driver's own methods replace those of the instance
        if self._quiet_until:
            one = self._running = self._compressing if compressed else self._dense
            self.prepare, self.commit, self.roll_back = one.prepare, one.commit, one.roll_back  # type: ignore[method-assign]
            self.prepares = one.prepares
            self._settled = one.steps

    def _listen(self) -> None:
        for name in ("prepare", "prepares", "commit", "roll_back"):
            self.__dict__.pop(name, None)

    def _measured(self, call: VectorCall) -> Iterator[bool]:
        self._listen()
        plan, schedule, step, clock = self.plan, self._schedule, call.step, call.traffic.clock
        if step >= schedule.end(plan):
            self._running = self._dense  # a failure while ranks decide needs no roll-back
            plan = yield from self._decide(call)
        place = schedule.place(plan, step)
        side = place.side
        self._next, self._clears = plan, False
        self._running = self._compressing if side is Side.COMPRESSED else self._dense
        self._watch.begin(step, place, schedule.same_block(plan, step), clock())
        self._clock = clock
        if self.compressed and side is Side.DENSE:
            given = call.values, call.wide
            total = self._pending.added_to(call.values)
            call.wide = None if call.wide is None else total
            call.values = total
            try:
                yield from self._dense.steps(call)
            finally:  # survivors of a death repeat the step, from the vector alone, also if it had come to its end
                call.values, call.wide = given
            self._clears = not self._mean.skipped
        else:
            yield from self._running.steps(call)

    def _decide(self, call: VectorCall) -> Generator[bool, None, TrialPlan]:
        """Return the next plan, from the times of all ranks."""
        channel, step = self._channel, call.step
        self._watch.report(step, channel.mine)
        yield from channel.swap(call, call.traffic)
        times = slowest(channel.everyones)
        plan = self._schedule.next(self.plan, step, times)
        if self._logs and plan.stage is Stage.CHOSEN and self.plan.stage is not Stage.CHOSEN:
            _log.info(_describe_choice(self._spec, self._name, plan.side, times))
        return plan


def _describe_choice(spec: VectorSpec, name: str, side: Side, times: TrialTimes) -> str:
    """Return a line such as "vector 3, 25.0 MB: marsit, 4.1 ms instead of 31 (a step 60 ms instead of 83)"."""
    nbytes, other = spec.n * spec.stored.itemsize, Side.DENSE if side is Side.COMPRESSED else Side.COMPRESSED
    size = f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.3g} kB"
    both = ([times.calls[one], times.period(one)] for one in (side, other))
    call, step = (f"{mine * 1e3:.3g} ms instead of {others * 1e3:.3g}" for mine, others in zip(*both, strict=True))
    return f"vector {spec.vector_id}, {size}: {name if side is Side.COMPRESSED else 'dense'}, {call} (a step {step})"


class ChosenFeedback:
    """Feedback of the method, with the plan in its states. Other attributes are those of the method's feedback."""

    def __init__(self, inner: Feedback, driver: Chosen) -> None:
        self._inner, self._driver = inner, driver
        self.state_kinds: dict[str, StateKind] = {**inner.state_kinds, KEY: "shared"}
        self.why_unusable = inner.why_unusable  # read in every call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_inner"), name)

    def state(self) -> State:
        """Return the method's state; entry "auto" has the plan, the number of ranks, and a flag for pending errors."""
        one = self._driver
        plan = np.array([*one.plan.numbers(), one.ranks, one.compressed], np.float64)
        return {**self._inner.state(), KEY: plan}

    def like(self) -> State:
        """Return an array with the expected shape and type for each entry that a state must have."""
        return {**self._inner.like(), KEY: np.zeros(6)}

    def check_owner(self, state: dict[str, Any], where: str) -> None:
        """Raise ValueError for an invalid plan, and for entries of elements that another rank owns."""
        try:
            self._plan_of(state)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        self._inner.check_owner(state, where)

    def load(self, state: dict[str, Any]) -> str:
        """Take over a checked state; a plan of another number of ranks is not used."""
        compared = self._inner.load(state)
        plan, compressed = self._plan_of(state)
        self._driver.load(plan, compressed)
        return f"{compared} {plan}".strip()

    def _plan_of(self, state: dict[str, Any]) -> tuple[TrialPlan, bool]:
        step = int(state["step"])
        *numbers, ranks, compressed = np.asarray(state[KEY], np.float64).tolist()
        try:
            plan = TrialPlan.of(numbers, step)
        except ValueError as error:
            raise ValueError(f"this state's {KEY} {error}: take an earlier one") from None
        return plan if ranks == self._driver.ranks else self._driver.first_plan(step), bool(compressed)
