"""One of two reducers, whichever is faster: the exact mean, or that of a method that compresses.

The method starts anew whenever it is taken up. When it is left, the exact mean is that of the vectors and of all that
was pending, and nothing is pending any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Feedback, Parts, Reducer, State, StateKind, VectorSpec
from mpicomp.reducers.full_precision_mean import FullPrecisionMean
from mpicomp.reducers.side_channel import SideChannel
from mpicomp.reducers.stopwatch import COUNT, Front, Stopwatch, slowest
from mpicomp.reducers.trials import Plan, Schedule, Side, Stage, Times

KEY = "auto"  # of the entry that a state has beside those of the method
PENDING_KINDS = ("mean", "owner")

_log = logging.getLogger("mpicomp")


def chosen(comm: Communicator, spec: VectorSpec, parts: Parts, schedule: Schedule, name: str, skips: bool) -> Parts:
    """The parts of a method, and beside its reducer an exact mean.

    Parameters
    ----------
    comm : Communicator
    spec : VectorSpec
    parts : Parts
        Of the method that compresses.
    schedule : Schedule
    name : str
        The method's, for the log.
    skips : bool
        Steps with NaN or infinity give zeros, as the method does it.
    """
    feedback = ChosenFeedback(parts.feedback, comm, schedule)
    dense = SkippingMean(comm, parts.feedback) if skips else FullPrecisionMean(comm)
    return Parts(feedback, parts.codec, Chosen(comm, spec, feedback, parts.reducer, dense, name))


class ChosenFeedback:
    """What the method carries, and the plan; see `Feedback`.

    Attributes
    ----------
    plan : Plan
    compressed : bool
        The method made the last step, so something may be pending.
    quiet : range
        Steps of which nothing is measured: they go the way of the last one.
    """

    def __init__(self, inner: Feedback | None, comm: Communicator, schedule: Schedule) -> None:
        self._inner, self._ranks = inner, comm.size
        self.schedule = schedule if comm.size > 1 else replace(schedule, retry_every=None)
        kinds: dict[str, StateKind] = {} if inner is None else inner.state_kinds
        self.state_kinds: dict[str, StateKind] = {**kinds, KEY: "shared"}
        self.state_nan = "" if inner is None else inner.state_nan
        self._fresh = {key: one for key, one in self._inner_state().items() if kinds[key] not in PENDING_KINDS}
        self.watch = Stopwatch(comm.common(Front))
        self.take(self._first(0), compressed=False)

    def _first(self, step: int) -> Plan:
        """Nothing is known. One rank sends nothing, so there is nothing to choose."""
        return Plan(Stage.BRIEF if self._ranks > 1 else Stage.CHOSEN, step)

    def take(self, plan: Plan, compressed: bool) -> None:
        """A step of a plan has been made, by the method or not."""
        self.plan, self.compressed = plan, compressed
        goes_on = compressed == (plan.side is Side.COMPRESSED)
        self.quiet = self.schedule.quiet(plan) if goes_on else range(0)

    # What is pending -------------------------------------------------------------------------------------------------

    def with_pending(self, values: NDArray[Any]) -> NDArray[Any]:
        """The vector and all that is pending on this rank, of which the mean over ranks is taken; maybe a copy."""
        total = None
        for key, array in self._inner_state().items():
            kind = self.state_kinds[key]
            if kind in PENDING_KINDS and array.shape == values.shape:
                if kind == "owner":  # its owner's alone is part of the mean, and as a whole
                    array *= array.dtype.type(self._ranks)
                total = array if total is None else np.add(total, array, out=total)
        return values if total is None else np.add(total, values, out=total)

    def start_anew(self) -> None:
        """Forget what is pending, and everything else that the method has learnt."""
        if self._inner is not None:
            nothing = {key: np.zeros_like(array) for key, array in self._inner.like().items()}
            self._inner.load(nothing | self._fresh)

    # See `Feedback` --------------------------------------------------------------------------------------------------

    @property
    def residual(self) -> NDArray[Any] | None:
        """See `Feedback`."""
        return None if self._inner is None else self._inner.residual

    def check_ready(self) -> None:
        """See `Feedback`."""
        if self._inner is not None:
            self._inner.check_ready()

    def _inner_state(self) -> State:
        return {} if self._inner is None else self._inner.state()

    def state(self) -> State:
        """What the method keeps; and under "auto" the plan, the number of ranks, and whether something is pending."""
        return {**self._inner_state(), KEY: np.array([*self.plan.numbers(), self._ranks, self.compressed], np.float64)}

    def like(self) -> State:
        """See `Feedback`."""
        return {**({} if self._inner is None else self._inner.like()), KEY: np.zeros(6)}

    def check_owner(self, state: dict[str, Any], where: str) -> None:
        """Raise ValueError for errors of elements that are another rank's, and for a plan that is none."""
        try:
            Plan.of(np.asarray(state[KEY], np.float64), int(state["step"]))
        except ValueError as error:
            raise ValueError(f"{where}: this state's {KEY} {error}: take an earlier one") from None
        check_owner = getattr(self._inner, "check_owner", None)
        if check_owner is not None:
            check_owner(state, where)

    def load(self, state: dict[str, Any]) -> str:
        """See `Feedback`; what other numbers of ranks have found out does not count."""
        told = "" if self._inner is None else self._inner.load(state)
        *numbers, ranks, compressed = state[KEY].tolist()
        known = ranks == self._ranks
        plan = Plan.of(np.array(numbers), state["step"]) if known else self._first(state["step"])
        self.take(plan, bool(compressed))
        self.watch.clear()
        return f"{told} {plan}".strip()


class Chosen(Reducer):
    """A step by the one that is chosen, or on trial; see `Reducer`."""

    def __init__(
        self,
        comm: Communicator,
        spec: VectorSpec,
        feedback: ChosenFeedback,
        compressing: Reducer,
        dense: FullPrecisionMean,
        name: str,
    ) -> None:
        self._feedback, self._compressing, self._dense, self._spec, self._name = (
            feedback,
            compressing,
            dense,
            spec,
            name,
        )
        self._tells = comm.rank == 0
        self._channel = SideChannel(comm, COUNT)
        self._running: Reducer = dense
        self._watched: Callable[[], float] | None = None  # the clock of a step that is measured
        self._next = feedback.plan
        self._clears = False

    def prepare(self, step: int) -> None:
        """See `Reducer`."""
        feedback = self._feedback
        plan, schedule = feedback.plan, feedback.schedule
        if step in feedback.quiet:
            compressed = feedback.compressed
        else:
            compressed = step < schedule.end(plan) and schedule.place(plan, step).side is Side.COMPRESSED
        if compressed:
            self._compressing.prepare(step)

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
        feedback = self._feedback
        if call.step in feedback.quiet:  # it is to cost what the one that is chosen costs alone
            self._running = self._compressing if feedback.compressed else self._dense
            return self._running.steps(call)
        return self._measured(call)

    def commit(self) -> None:
        """See `Reducer`."""
        self._running.commit()
        if self._watched is not None:
            feedback, clock = self._feedback, self._watched
            feedback.watch.end(clock())
            self._watched = None
            compressed = self._running is self._compressing
            if self._clears:
                feedback.start_anew()
            if self._next is not feedback.plan:
                feedback.watch.clear()
            # where a step was skipped, what was pending still is
            feedback.take(self._next, compressed or (feedback.compressed and not self._clears))

    def roll_back(self) -> None:
        """See `Reducer`."""
        self._running.roll_back()
        if self._watched is not None:
            self._feedback.watch.fail()
            self._watched = None

    def _measured(self, call: VectorCall) -> Iterator[bool]:
        feedback, clock = self._feedback, call.traffic.clock
        plan, schedule, step = feedback.plan, feedback.schedule, call.step
        if step >= schedule.end(plan):
            self._running = self._dense  # which a failure does not matter to
            plan = yield from self._decide(call)
        side, measured = schedule.place(plan, step)
        self._next, self._clears = plan, False
        self._running = self._compressing if side is Side.COMPRESSED else self._dense
        feedback.watch.begin(step, measured, schedule.same_block(plan, step), clock())
        self._watched = clock
        if feedback.compressed and side is Side.DENSE:
            total = feedback.with_pending(call.values)
            call.wide = None if call.wide is None else total
            call.values = total
            yield from self._dense.steps(call)
            self._clears = not self._dense.skipped
        else:
            yield from self._running.steps(call)

    def _decide(self, call: VectorCall) -> Generator[bool, None, Plan]:
        feedback, channel, step = self._feedback, self._channel, call.step
        feedback.watch.begin(step, None, True, call.traffic.clock())  # the period of the last step
        feedback.watch.report(step, channel.mine)
        yield from channel.swap(call, call.traffic)
        times = slowest(channel.everyones)
        plan = feedback.schedule.next(feedback.plan, step, times)
        if self._tells and plan.stage is Stage.CHOSEN and feedback.plan.stage is not Stage.CHOSEN:
            _log.info(_told(self._spec, self._name, plan.side, times))
        return plan


class SkippingMean(FullPrecisionMean):
    """Zeros where a rank has NaN or infinity, and nothing else changes."""

    def __init__(self, comm: Communicator, feedback: Any) -> None:
        super().__init__(comm)
        self._feedback = feedback

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
        self.skipped = False
        try:
            yield from super().steps(call)
        except NonFiniteGradient as error:
            if not error.ranks:  # finite numbers overflowed
                raise
            self.skipped = True
            self._feedback.skipped += 1
            call.out[:] = 0


def _told(spec: VectorSpec, name: str, side: Side, times: Times) -> str:
    """As in "vector 3, 25.0 MB: marsit, 4.1 ms instead of 31 (a step 60 ms instead of 83)"."""
    nbytes, other = spec.n * spec.stored.itemsize, Side.DENSE if side is Side.COMPRESSED else Side.COMPRESSED
    size = f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.3g} kB"
    calls, steps = (
        f"{one[side] * 1e3:.3g} ms instead of {one[other] * 1e3:.3g}" for one in (times.calls, times.periods)
    )
    return f"vector {spec.vector_id}, {size}: {name if side is Side.COMPRESSED else 'dense'}, {calls} (a step {steps})"
