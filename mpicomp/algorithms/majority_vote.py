"""Majority vote: the sign that most ranks gave (signSGD with majority vote).

    k = number of ranks with sgn(g) = +1;   result = +1 where k > M/2, -1 where k < M/2, a fair coin where k = M/2

Counts travel in the reduce phase, the majority's signs, one bit per element, in the gather phase. The result is +-1:
the caller scales it. There is no residual, so zeros alternate with the parity of step + index, or a coordinate whose
gradient is always zero would drift for ever.

References: J. Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR
(2019), over a parameter server; under multi-hop all-reduce: Marsit (arXiv 2204.06787), sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from collectives import Communicator
from collectives.devices import named
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, Reducer, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.options import integer
from mpicomp.codecs.vote_counts import Counts
from mpicomp.feedback.majority import MajorityCodec
from mpicomp.feedback.majority_device import DeviceMajority
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.side_channel import SideChannel, bad_ranks
from mpicomp.reducers.vote_count import VoteCount, counts_model


@dataclass(frozen=True)
class MajorityVote(Algorithm):
    """Options of the majority vote.

    Parameters
    ----------
    seed : int
        Of the coins that decide ties; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        integer(self, "seed")

    @property
    def estimates_mean(self) -> bool:
        """Results are signs."""
        return False

    @property
    def keeps_scale(self) -> bool:
        """Results are -1 and +1."""
        return False

    def encodes_on_devices(self, dtype: str) -> bool:
        """See `Algorithm`."""
        return True

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Votes are counted, the majority's signs go round."""
        reducer = VoteCount(self, comm, spec)
        stream = Stream(self.seed, spec.vector_id, "tie")
        about = reducer.program.pieces, spec.dtype, comm.size, stream, reducer.payload.counts
        codec = MajorityCodec(*about) if spec.device == "cpu" else DeviceMajority(named(spec.device), *about)
        return Parts(None, codec, MajorityRounds(comm, codec, reducer))

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: counts, and one bit per element once they are complete."""
        counts = Counts()
        return counts_model(
            n, ranks, piece_bytes, lambda elements, weight: counts.nbytes(elements, 1 if weight == ranks else weight)
        )


class MajorityRounds(Reducer):
    """A step of majority vote; see `Reducer`."""

    def __init__(self, comm: Communicator, codec: MajorityCodec, reducer: VoteCount) -> None:
        self._alone, self._codec, self._reducer = comm.size == 1, codec, reducer
        self.encode, self.finish = codec.encode, codec.finish  # see `SignFeedback`
        self._side_channel = SideChannel(comm, 1)

    def commit(self) -> None:
        """See `Reducer`."""
        self._codec.end()

    roll_back = commit

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
        if not call.spec.n:
            return
        self._codec.begin(call.step, call.values, call.out)
        yield from self._reducer.steps(call, self, None if self._alone else self._codec.decide)
        channel = self._side_channel
        yield from channel.collect(call, call.traffic)
        bad = bad_ranks(channel.everyones[:, 0] != 0)
        if bad:
            raise call.non_finite(bad)

    def encoded(self) -> None:
        """Tell the others whether this rank's vector is finite, while counts are still travelling."""
        self._side_channel.mine[0] = not self._codec.finite
        self._side_channel.start()
