"""Majority vote: the sign that most ranks gave (signSGD with majority vote).

    k = number of ranks with sgn(g) = +1;   result = +1 where k > M/2, -1 where k < M/2, a fair coin where k = M/2

Counts travel in the reduce phase, the majority's signs, one bit per element, in the gather phase. The result is +-1:
the caller scales it. There is no residual, so zeros alternate with the parity of step + index, or a coordinate whose
gradient is always zero would drift for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Parts, VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import integer
from mpicomp.feedback.majority import MajorityVotes
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.families import VotingMethod
from mpicomp.reducers.vote_count import VoteCount


@method("majority-vote", Learned(Grade.COMPARED, "ended 1 and 5 points behind dense"))
@dataclass(frozen=True)
class MajorityVote(VotingMethod):
    """Options of the majority vote: each result is the sign that most ranks have, without a residual.

    Parameters
    ----------
    seed : int
        Seed of the coins that decide ties; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with majority vote is communication efficient and fault
    tolerant", ICLR 2019 (arXiv 1810.05291), over a parameter server; Marsit (arXiv 2204.06787), sections 3 and 5, under
    multi-hop all-reduce.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def vote(comm):
    ...     gradient = np.array([[5, -1, 2], [-1, -1, 1], [-1, -1, -3]], np.float32)[comm.rank]
    ...     return mpicomp.MajorityVote().start(comm, 3).aggregate(gradient)
    >>> mpicomp.run_local(3, vote)[0]
    array([-1., -1.,  1.], dtype=float32)
    """

    seed: int = 0

    def __post_init__(self) -> None:
        integer(self, "seed")

    estimates_mean: ClassVar[bool] = False
    """False: results are signs."""

    keeps_scale: ClassVar[bool] = False
    """False: results are -1 and +1."""

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """No feedback x signs x vote counting; the majority's signs travel in the gather phase."""
        reducer = VoteCount(self, comm, spec)
        votes = MajorityVotes(reducer.layout, Stream(self.seed, spec.vector_id, "tie"))
        return Parts(votes, reducer)

    @override
    def count_bytes(self, elements: int, weight: int, ranks: int) -> int:
        # complete counts are replaced by one bit per element
        return super().count_bytes(elements, 1 if weight == ranks else weight, ranks)
