"""EF-signSGD under all-reduce: signs counted, one scale for all ranks, and a residual that keeps what they miss.

Per step and bucket of D elements, with g this rank's gradient and e its residual:

    p = g + e,   s = mean over ranks of ||p||_1 / D,   result = s * mean over ranks of sgn(p),   e = p - s sgn(p)

The ranks' norms travel beside the signs, not before them: s is needed only to make values of the counts. What is kept
is p; s sgn(p) is subtracted while the next step is encoded.

Departure from the paper: its workers have a scale each, which counts cannot carry. With one scale for all, this is the
scaled sign of the ranks' vectors put end to end, so the sum over ranks of ||e||^2 is that of ||p||^2 less M D s^2:
compression is still a contraction, which is what error feedback asks for.

Reference: S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error feedback fixes signSGD and other gradient
compression schemes", ICML (2019).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from collectives import Communicator, NonFiniteGradient
from collectives.devices import named
from collectives.progress.polling import done
from collectives.testable import Testable
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.options import integer
from mpicomp.codecs.vote_counts import Counts
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.shared_scale import SharedScale
from mpicomp.feedback.shared_scale_device import DeviceSharedScale
from mpicomp.reducers.side_channel import SideChannel, bad_ranks
from mpicomp.reducers.vote_count import VoteCount, counts_model


@dataclass(frozen=True)
class EFSignSGD(Algorithm):
    """Options of EF-signSGD.

    Parameters
    ----------
    bucket : int or None
        Elements that share a scale, at least 1, counted from the start of each tensor; the last may be fewer. None:
        the whole tensor, or vector.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    bucket: int | None = None

    def __post_init__(self) -> None:
        integer(self, "bucket", 1, also=(None,))

    @property
    def uses_tensor_lengths(self) -> bool:
        """Each tensor has scales of its own."""
        return True

    def encodes_on_devices(self, dtype: str) -> bool:
        """See `Algorithm`."""
        return True

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Signs of the vector and the residual are counted; scales travel beside."""
        reducer = VoteCount(self, comm, spec)
        groups = ScaleGroups.of(spec.tensor_lengths, spec.n, self.bucket)
        about = groups, reducer.program.pieces, spec.dtype, comm.size
        feedback = SharedScale(*about) if spec.device == "cpu" else DeviceSharedScale(named(spec.device), *about)
        feedback.lay_out(reducer.payload.counts)
        return Parts(feedback, Counts(), EFSignRounds(comm, feedback, reducer))

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`; the scales, which go once to every rank, are spread over both phases."""
        counts, bucket = Counts(), self.bucket

        def nbytes(elements: int, weight: int) -> int:
            scales = 0 if bucket is None else 4 * ranks * -(-elements // bucket)
            return counts.nbytes(elements, weight) + scales

        return counts_model(n, ranks, piece_bytes, nbytes)


class EFSignRounds:
    """A step of EF-signSGD; see `Reducer`."""

    def __init__(self, comm: Communicator, feedback: SharedScale, reducer: VoteCount) -> None:
        self._feedback, self._reducer = feedback, reducer
        self.commit, self.roll_back = feedback.commit, feedback.end  # see `Reducer`
        self.encode = feedback.encode  # see `SignFeedback`
        self._side_channel = SideChannel(comm, feedback.groups.starts.size)

    def prepare(self, step: int) -> None:
        """See `Reducer`."""

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
        if not call.spec.n:
            return
        feedback, traffic, channel = self._feedback, call.traffic, self._side_channel
        feedback.begin(call.values, call.out, call.wide)
        self._problem: NonFiniteGradient | None = None
        self._scaled = False
        self._counted: list[int] = []  # pieces whose counts were there before the scales
        for moved in self._reducer.steps(call, self):
            if not self._scaled and channel.started and channel.arrived():
                describe = call.describe
                yield from channel.collect(call, traffic)  # all of it has arrived
                call.describe = describe
                self._take_scales(call)
            yield moved
        if not self._scaled:
            yield from channel.collect(call, traffic)
            self._take_scales(call)
        if self._problem is not None:
            try:
                raise self._problem
            finally:
                self._problem = None  # its traceback has this frame, and they would keep each other
        start = traffic.clock()
        for written in [self._feedback.finish(piece) for piece in self._counted]:
            yield from done(call, written)
        seconds = traffic.clock() - start
        traffic.seconds_decoding += seconds
        traffic.seconds_total += seconds

    def encoded(self) -> None:
        """Send this rank's norms while the signs are still travelling."""
        self._feedback.report(self._side_channel.mine)
        self._side_channel.start()

    def finish(self, piece: int) -> Testable | None:
        """See `SignFeedback`: at once, if the scales are there."""
        if self._scaled and self._problem is None:
            return self._feedback.finish(piece)
        self._counted.append(piece)
        return None

    def _take_scales(self, call: VectorCall) -> None:
        """Make scales of the ranks' norms, added up in rank order; messages may still be in flight, so do not raise."""
        norms = self._side_channel.everyones
        representable = self._feedback.take_scales(norms)
        bad = bad_ranks(np.isnan(norms).any(axis=1))
        if bad:
            self._problem = call.non_finite(bad)
        elif not representable:
            self._problem = call.non_finite((), "the scale")
        self._scaled = True  # last: from now on other threads use them
