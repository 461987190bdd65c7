"""The driver of a step: it calls feedback and reducer in turn, and lets the ranks agree that the step is good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from collectives import Communicator, NonFiniteGradient
from collectives.annotations import Testable, override
from collectives.progress.polling import done, until
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.feedback.base import Feedback, Problem

Work = Callable[[int], Testable | None]


class PieceReducer(Protocol):
    """Moves the payloads of pieces between ranks and combines them.

    Attributes
    ----------
    side_channel : SideChannel or None
        The channel of the ranks' reports, if payloads travel on it; None: the driver makes one.
    brief : bool
        There is so little to decode that nothing is gained by doing it while messages travel.
    at_once : bool
        The reports and payloads of all ranks travel in the single exchange of `side_channel`.
    """

    side_channel: SideChannel | None = None
    brief: bool = False
    at_once: bool = False

    def prepare_step(self, step: int) -> None:
        """Do ahead the work of a step that needs no vector. Not always called, so `run` must not depend on it."""
        return

    def run(self, call: VectorCall, encode: Work, decode: Work, encoded: Callable[[], None]) -> Iterator[bool]:
        """Have each piece encoded, call `encoded` after the last one, and have each complete piece decoded."""
        ...


class StepDriver(Reducer):
    """Steps of one vector: announce, encode, reduce, agree, decode; then commit or roll back.

    Parameters
    ----------
    comm : Communicator
    feedback : Feedback
    reducer : PieceReducer or None
        None: a driver of its own class moves the payloads.
    """

    skips_empty = True  # ranks exchange nothing for vectors without elements

    reducer: PieceReducer

    def __init__(self, comm: Communicator, feedback: Feedback, reducer: PieceReducer | None) -> None:
        self.feedback, channel = feedback, None
        if reducer is not None:
            self.reducer, channel = reducer, reducer.side_channel
            self._pass_on("prepare", reducer.prepare_step)
        self.at_once = reducer is not None and reducer.at_once
        self._pass_on("commit", feedback.commit)
        self._pass_on("roll_back", feedback.roll_back)
        self._pass_on("settle", feedback.settle)
        self.channel = channel or SideChannel(comm, feedback.n_reports)
        self.can_compare = comm.verifies and self.channel.fits_comparison

    def _pass_on(self, name: str, method: Callable[..., None]) -> None:
        """Let a method of a part be the driver's own, unless a class overrides it."""
        # an instance attribute, since a step of a short vector should not pay for a call that only passes on; a bound
        # method of the driver itself must not be one: the driver would be freed late, as part of a cycle
        if getattr(type(self), name) is getattr(StepDriver, name):
            self.__dict__[name] = method

    @property
    def can_undo(self) -> bool:
        """True if the state of before the last step is kept."""
        return self.feedback.can_undo

    def undo(self) -> None:
        """Take back the last `commit`; no step has begun since."""
        self.feedback.undo()

    @override
    def compares(self, step: int) -> bool:
        return self.can_compare and (self.at_once or self.feedback.reports_first(step))

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """Write the result of a step to ``call.out``; see `Reducer`."""
        if not call.spec.n and self.skips_empty:
            return
        feedback = self.feedback
        if self.can_compare:
            self.channel.compare_with(call.compare)
        feedback.begin(call)
        if feedback.reports_first(call.step):
            yield from self.announce(call)
        if (problem := feedback.fix_scales()) is not None:
            if call.compare is not None:  # a later call waits for the comparison of each call before it
                yield from self.channel.swap(call, call.traffic)
            raise error_of(call, problem)
        if feedback.decodes_with_reports:
            yield from self._decode_with_reports(call)
        else:
            yield from self.reducer.run(call, feedback.encode, feedback.decode, self.report)
            if feedback.reports_when is not None:
                yield from self.collect(call)
        self.settle(call)

    def settle(self, call: VectorCall) -> None:
        """All pieces are decoded on this rank. Hook of methods."""
        self.feedback.settle(call)

    # Reports ---------------------------------------------------------------------------------------------------------

    def announce(self, call: VectorCall) -> Iterator[bool]:
        """Exchange the reports that encoding needs: those of this rank's measured vector. Hook of methods."""
        traffic, clock = call.traffic, call.traffic.clock
        start = clock()
        yield from done(call, self.feedback.measure())
        self.feedback.report(self.channel.mine)
        measured = clock()
        yield from self.channel.swap(call, traffic)
        end = clock()
        traffic.seconds_encoding += measured - start
        traffic.seconds_waiting += end - measured
        traffic.seconds_total += end - start
        if (problem := self.feedback.adopt(self.channel.everyones)) is not None:
            raise error_of(call, problem)

    def report(self) -> None:
        """Send this rank's reports while its payloads are still travelling."""
        if self.feedback.reports_when == "beside":
            self.feedback.report(self.channel.mine)
            self.channel.start()

    def collect(self, call: VectorCall) -> Iterator[bool]:
        """Take in the reports; raise one error on all ranks, with nothing in flight, if the step must fail."""
        if self.feedback.reports_when == "after":
            self.feedback.report(self.channel.mine)
            self.channel.start()
        if self.channel.started:
            yield from self.channel.collect(call, call.traffic)
        if (problem := self.feedback.adopt(self.channel.everyones)) is not None:
            raise error_of(call, problem)

    # Steps whose pieces are decoded with the ranks' reports ----------------------------------------------------------

    def _decode_with_reports(self, call: VectorCall) -> Iterator[bool]:
        """Run the reducer, and take in the reports as soon as they are there: pieces are decoded from then on."""
        feedback, traffic = self.feedback, call.traffic
        waiting: list[int] = []  # complete pieces that cannot be decoded before the reports are there
        if self.reducer.brief:
            yield from self.reducer.run(call, feedback.encode, waiting.append, self.report)
            yield from self.collect(call)
        else:
            yield from self._decode_early(call, waiting)
        start = traffic.clock()
        for written in [feedback.decode(piece) for piece in waiting]:
            if written is not None:
                yield from until(written, call)
        seconds = traffic.clock() - start
        traffic.seconds_decoding += seconds
        traffic.seconds_total += seconds

    def _decode_early(self, call: VectorCall, waiting: list[int]) -> Iterator[bool]:
        feedback, channel = self.feedback, self.channel
        problem: Problem | None = None
        has_reports = False

        def decode(piece: int) -> Testable | None:
            if has_reports and problem is None:
                return feedback.decode(piece)
            waiting.append(piece)
            return None

        for moved in self.reducer.run(call, feedback.encode, decode, self.report):
            if not has_reports and channel.started and channel.arrived():
                describe = call.describe
                yield from channel.collect(call, call.traffic)  # all of it has arrived
                call.describe = describe
                problem = feedback.adopt(channel.everyones)  # not raised before all messages have ended
                has_reports = True  # last: from now on other threads decode
            yield moved
        if not has_reports:
            yield from self.collect(call)
        elif problem is not None:
            raise error_of(call, problem)


def error_of(call: VectorCall, problem: Problem) -> NonFiniteGradient:
    """Return the error of a problem, which every rank raises."""
    if problem.out_of_range:
        return call.out_of_range(problem.ranks, problem.out_of_range)
    return call.non_finite(problem.ranks, problem.quantity)
