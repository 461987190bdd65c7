"""The driver of a step: it calls feedback and reducer in turn, and lets the ranks agree that the step is good."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from collectives import Communicator, NonFiniteGradient
from collectives.annotations import Testable, override
from collectives.execution.jobs import in_parts
from collectives.execution.staged import until_queued
from collectives.progress.polling import done
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Driver, Parts, Reducer
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.feedback.base import Problem
from mpicomp.feedback.rounds import Round


class StepDriver(Driver):
    """Steps of one vector: announce, encode, reduce, agree, decode; then `commit` or `roll_back` of the feedback.

    Parameters
    ----------
    comm : Communicator
    parts : Parts
    is_dense : callable, optional
        ``is_dense(step)``: whether a step is made in full precision by ``parts.dense``; needed if that is given.

    Raises
    ------
    TypeError
        One of `is_dense` and ``parts.dense`` is missing.
    """

    undoes = True
    skips_empty = True  # ranks exchange nothing for vectors without elements

    def __init__(self, comm: Communicator, parts: Parts, is_dense: Callable[[int], bool] | None = None) -> None:
        self.feedback, self.reducer, self.dense = feedback, reducer, dense = parts.feedback, parts.reducer, parts.dense
        if is_dense is None if dense is not None else is_dense is not None and is_dense(0):
            raise TypeError("steps in full precision need both: is_dense of the options, and dense of the parts")
        self._is_dense = is_dense if dense is not None else None
        self._rounds = feedback.rounds()
        self.array_steps = reducer.array_steps
        is_overridden = type(self).prepare is not StepDriver.prepare
        self.prepares = is_overridden or type(reducer).prepare_step is not Reducer.prepare_step
        if self._is_dense is None:
            self._pass_on("prepare", reducer.prepare_step)
        self._pass_on("commit", feedback.commit)
        self._pass_on("roll_back", feedback.roll_back)
        self._pass_on("end_decoding", feedback.end_decoding)
        self.channel = reducer.side_channel or SideChannel(comm, feedback.n_reports)
        nbytes = feedback.announced_bytes
        # the first exchange of a step that announces or sends payloads at once: it can travel with the comparison
        self._first = self.channel if nbytes is None else SideChannel(comm, 0, nbytes)
        self.can_compare = comm.verifies and self._first.fits_comparison
        self.at_once = reducer.at_once and self._first is self.channel

    def _pass_on(self, name: str, method: Callable[..., object]) -> None:
        """Let a method of a part be the driver's own, unless a class overrides it."""
        # an instance attribute, since a step of a short vector should not pay for a call that only passes on; a bound
        # method of the driver itself must not be one: the driver would be freed late, as part of a cycle
        if getattr(type(self), name) is getattr(StepDriver, name):
            self.__dict__[name] = method

    def is_dense(self, step: int) -> bool:
        """Return True if a step is made in full precision."""
        return self._is_dense is not None and self._is_dense(step)

    @override
    def prepare(self, step: int) -> None:
        if not self.is_dense(step):
            self.reducer.prepare_step(step)

    @property
    @override
    def can_undo(self) -> bool:
        return self.feedback.can_undo

    @override
    def undo(self) -> None:
        self.feedback.undo()

    @override
    def compares(self, step: int) -> bool:
        return self.can_compare and (self.at_once or self.feedback.reports_first(step)) and not self.is_dense(step)

    @override
    def reads_pieces(self, step: int) -> bool:
        return self.feedback.reads_pieces(step) and not self.is_dense(step)

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        return self.in_full_precision(call) if self.is_dense(call.step) else self.compressed(call)

    def in_full_precision(self, call: VectorCall) -> Iterator[bool]:
        """Return the steps of a call that `is_dense`. Hook of methods."""
        assert self.dense is not None
        return self.dense.run(call, _NOTHING, _nothing)

    def compressed(self, call: VectorCall) -> Iterator[bool]:
        """Return the steps of a call whose vector is encoded."""
        if not call.spec.n and self.skips_empty:
            return
        feedback = self.feedback
        if self.can_compare:
            self._first.compare_with(call.compare)
        feedback.begin(call)
        if feedback.reports_first(call.step):
            yield from self.announce(call)
        if (problem := feedback.fix_scales()) is not None:
            if call.compare is not None:  # a later call waits for the comparison of each call before it
                yield from self._first.swap(call, call.traffic)
            raise error_of(call, problem)
        if feedback.decodes_with_reports:
            yield from self._decode_with_reports(call)
        else:
            encoded = self.report
            for work in self._rounds:
                yield from self.reducer.run(call, work, encoded)
                encoded = _nothing
            if feedback.reports_when is not None:
                yield from self.collect(call)
        if (written := self.end_decoding(call)) is not None:
            yield from until_queued(call, written)

    def end_decoding(self, call: VectorCall) -> Testable | None:
        """All pieces are decoded on this rank. Hook of methods; returns a handle if there is something to wait for."""
        return self.feedback.end_decoding(call)

    # Reports ---------------------------------------------------------------------------------------------------------

    def announce(self, call: VectorCall) -> Iterator[bool]:
        """Exchange the numbers that encoding needs: those of this rank's measured vector."""
        feedback, channel, traffic, clock = self.feedback, self._first, call.traffic, call.traffic.clock
        start, before = clock(), traffic.seconds_encoding
        if feedback.measured_in:
            work = feedback.measure_share, feedback.measured_in, call.group.workers
            yield from in_parts(call, traffic, "seconds_encoding", *work)
        else:
            yield from done(call, feedback.measure())
        feedback.announce(channel.mine, channel.tail)
        measured = clock()
        yield from channel.swap(call, traffic)
        end = clock()
        # the seconds of several workers, which are counted already, may be more than those of this thread
        traffic.seconds_encoding = max(traffic.seconds_encoding, before + measured - start)
        traffic.seconds_waiting += end - measured
        traffic.seconds_total += end - start
        if (problem := feedback.adopt_announced(channel.everyones, channel.tails)) is not None:
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
            yield from self.reducer.run(call, self._rounds[0].with_decode(waiting.append), self.report)
            yield from self.collect(call)
        else:
            yield from self._decode_early(call, waiting)
        start = traffic.clock()
        for written in [feedback.decode(piece) for piece in waiting]:
            if written is not None:
                yield from until_queued(call, written)
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

        for moved in self.reducer.run(call, self._rounds[0].with_decode(decode), self.report):
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


def _nothing(*piece: int) -> None:
    """Stand for the encoding and decoding of a step whose vector travels as it is."""


_NOTHING = Round(_nothing, _nothing)


def error_of(call: VectorCall, problem: Problem) -> NonFiniteGradient:
    """Return the error of a problem, which every rank raises."""
    if problem.out_of_range:
        return call.out_of_range(problem.ranks, problem.out_of_range)
    return call.non_finite(problem.ranks, problem.quantity)
