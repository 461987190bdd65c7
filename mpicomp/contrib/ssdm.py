"""SSDM: counts of unbiased random signs. Stochastic sign descent, with optional momentum.

Per step and tensor, with g this rank's gradient:

    x = g, or with momentum m <- beta m + (1 - beta) g, x = m
    sign +1 with probability 1/2 + x_i / (2 N), else -1;   k = number of ranks with sign +1
    scale="norm": N is the largest of the ranks' ||x||_2,   result = N (2 k - M) / M, unbiased
    scale="none": N is this rank's own ||x||_2,             result = (2 k - M) / M, the caller scales

An element's sign is hardly better than a coin, as N is about sqrt(D) times the size of an element: the total variance
of the unbiased result is about D N^2 / M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Parts, VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.elias_counts import Elias
from mpicomp.codecs.options import choice, flag, integer, number
from mpicomp.codecs.vote_counts import Counts
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.stochastic_votes import StochasticVotes
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.families import VotingMethod
from mpicomp.reducers.vote_count import EliasPayload, VoteCount


@method(
    "ssdm",
    Learned(Grade.COMPARED, "ended 11 and 27 points behind dense"),
    forms=({}, {"momentum": 0.9, "scale": "norm", "coding": "elias"}),
)
@dataclass(frozen=True)
class SSDM(VotingMethod):
    """Options of SSDM: counts of random signs, with optional momentum.

    Parameters
    ----------
    momentum : float
        beta, at least 0 and below 1; 0: no momentum.
    scale : "none" or "norm"
        "none": probabilities use each rank's own norm, and results are means of signs. "norm": probabilities use the
        largest norm, which scales the result to an estimate of the gradient.
    coding : "fixed" or "elias"
        Coding of the counts in messages: fixed width, or the shorter of fixed width and Elias' codes.
    seed : int
        Seed of the random words; equal on all ranks.
    correlated : bool
        As in `QSGD`.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Safaryan, Richtarik, "Stochastic sign descent methods: new algorithms and better theory", ICML 2021
    (arXiv 1905.12938); Marsit (arXiv 2204.06787), sections 3 and 5, under multi-hop all-reduce.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     ssdm = mpicomp.SSDM().start(comm, 1000)
    ...     return ssdm.aggregate(np.ones(1000, np.float32))
    >>> np.unique(mpicomp.run_local(4, step)[0]).tolist()  # means of the signs of 4 ranks
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    """

    momentum: float = 0.0
    scale: Literal["none", "norm"] = "none"
    coding: Literal["fixed", "elias"] = "fixed"
    seed: int = 0
    correlated: bool = False

    def __post_init__(self) -> None:
        flag(self, "correlated")
        number(self, "momentum", "at least 0 and below 1", lambda beta: 0 <= beta < 1)
        choice(self, "scale", ("none", "norm"))
        choice(self, "coding", ("fixed", "elias"))
        integer(self, "seed")

    uses_tensor_lengths: ClassVar[bool] = True
    """True: each tensor has a norm of its own."""

    @property
    def estimates_mean(self) -> bool:
        """True if results have the vectors' magnitude and do not depend on the past."""
        return self.scale == "norm" and not self.momentum

    @property
    def keeps_scale(self) -> bool:
        """True if a norm scales the results, which are means of signs otherwise."""
        return self.scale == "norm"

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Momentum x stochastic signs x vote counting; norms travel before the signs."""
        elias = self.coding == "elias"
        reducer = VoteCount(self, comm, spec, EliasPayload if elias else None)
        groups = ScaleGroups.of(spec.tensor_lengths, spec.n)
        stream = Stream(self.seed, spec.vector_id, "stochastic sign")
        has_norm = self.scale == "norm"
        votes = StochasticVotes(reducer.layout, groups, comm.rank, self.momentum, stream, has_norm, self.correlated)
        return Parts(votes, reducer)

    @override
    def count_bytes(self, elements: int, weight: int, ranks: int) -> int:
        # the upper bound of Elias' codes, which vary in length
        return (Elias() if self.coding == "elias" else Counts()).nbytes(elements, weight)
