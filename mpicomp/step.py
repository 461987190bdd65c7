"""The driver of a step: it calls feedback and reducer in turn, and lets the ranks agree that the step is good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from collectives import Communicator
from collectives.annotations import Testable
from collectives.progress.polling import done
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
    """

    side_channel: SideChannel | None = None

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
        self._pass_on("commit", feedback.commit)
        self._pass_on("roll_back", feedback.roll_back)
        self.channel = channel or SideChannel(comm, feedback.n_reports)
        self._problem: Problem | None = None
        self._has_reports = False
        self._waiting: list[int] = []  # complete pieces that cannot be decoded before the reports are there

    def _pass_on(self, name: str, method: Callable[..., None]) -> None:
        """Let a method of a part be the driver's own, unless a class overrides it."""
        # an instance attribute, since a step of a short vector should not pay for a call that only passes on; a bound
        # method of the driver itself must not be one: the driver would be freed late, as part of a cycle
        if getattr(type(self), name) is getattr(Reducer, name):
            self.__dict__[name] = method

    @property
    def can_undo(self) -> bool:
        """Whether the state of before the last step is kept."""
        return self.feedback.can_undo

    def undo(self) -> None:
        """Take back the last `commit`; no step has begun since."""
        self.feedback.undo()

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """Write the result of a step to ``call.out``; see `Reducer`."""
        if not call.spec.n and self.skips_empty:
            return
        feedback, self._problem = self.feedback, None
        feedback.begin(call)
        if feedback.reports_first(call.step):
            yield from self.announce(call)
        if (problem := feedback.fix_scales()) is not None:
            self._raise(call, problem)
        if feedback.decodes_with_reports:
            yield from self._decode_with_reports(call)
        else:
            yield from self.reducer.run(call, feedback.encode, feedback.decode, self._encoded)
            when = feedback.reports_when
            if when is not None:
                if when == "after":
                    self._report()
                if self.channel.started:
                    yield from self.channel.collect(call, call.traffic)
                if (problem := feedback.adopt(self.channel.everyones)) is not None:
                    self._raise(call, problem)
        self.settle(call)

    def settle(self, call: VectorCall) -> None:
        """All pieces are decoded on this rank. Hook of methods."""
        self.feedback.settle()

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
        self._raise(call, self.feedback.adopt(self.channel.everyones))

    def _encoded(self) -> None:
        """Send this rank's reports while its payloads are still travelling."""
        if self.feedback.reports_when == "beside":
            self._report()

    def _report(self) -> None:
        self.feedback.report(self.channel.mine)
        self.channel.start()

    def _collect(self, call: VectorCall) -> Iterator[bool]:
        when = self.feedback.reports_when
        if when == "after":
            self._report()
        if when is not None:
            yield from self.channel.collect(call, call.traffic)
            self._problem = self.feedback.adopt(self.channel.everyones)

    def _raise(self, call: VectorCall, problem: Problem | None = None) -> None:
        """Raise the error of a problem, on all ranks alike, with nothing in flight."""
        problem, self._problem = problem or self._problem, None
        if problem is None:
            return
        if problem.out_of_range:
            raise call.out_of_range(problem.ranks, problem.out_of_range)
        raise call.non_finite(problem.ranks, problem.quantity)

    # Steps whose pieces are decoded with the ranks' reports ----------------------------------------------------------

    def _decode_with_reports(self, call: VectorCall) -> Iterator[bool]:
        """Run the reducer, and take in the reports as soon as they are there: pieces are decoded from then on."""
        feedback, channel, traffic = self.feedback, self.channel, call.traffic
        self._has_reports, self._waiting = False, []
        for moved in self.reducer.run(call, feedback.encode, self._decode_or_wait, self._encoded):
            if not self._has_reports and channel.started and channel.arrived():
                describe = call.describe
                yield from self._collect(call)  # all of it has arrived
                call.describe = describe
                self._has_reports = True  # last: from now on other threads decode
            yield moved
        if not self._has_reports:
            yield from self._collect(call)
        self._raise(call)
        start = traffic.clock()
        for written in [feedback.decode(piece) for piece in self._waiting]:
            yield from done(call, written)
        seconds = traffic.clock() - start
        traffic.seconds_decoding += seconds
        traffic.seconds_total += seconds

    def _decode_or_wait(self, piece: int) -> Testable | None:
        if self._has_reports and self._problem is None:
            return self.feedback.decode(piece)
        self._waiting.append(piece)
        return None
