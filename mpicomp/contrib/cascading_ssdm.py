"""Cascading compression: every hop decodes, adds and compresses again. The published failure, kept to show it.

    a hop receives Q(p), holds h:   sends Q(h + decode(Q(p))),   Q = SSDM's stochastic sign with one norm per chunk

Each Q is unbiased, but its error is sqrt(D) times the signal and is compressed again at the next hop: the amplitude
grows like D^((M-1)/2) and the signs of the result match those of the mean no better than a coin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.aggregator.registration import method
from mpicomp.codecs.options import flag, integer
from mpicomp.codecs.stochastic_sign import StochasticSign
from mpicomp.feedback.partial_sums import PartialSums
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.cascade import Cascade


@method("cascading-ssdm", forms=({}, {"normalise": True}), advised={})
@dataclass(frozen=True)
class CascadingSSDM(Algorithm):
    """Options of cascading compression: each hop compresses again. A published failure, kept to show it.

    Parameters
    ----------
    normalise : bool
        Scale the result to the mean of the ranks' norms and keep its direction: this undoes the growth of the
        amplitude (at the cost of one number per chunk and rank), but not the noise.
    seed : int
        Equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Marsit (arXiv 2204.06787), section 3.1 and Table 1.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def average_ones(comm):
    ...     cascading = mpicomp.CascadingSSDM().start(comm, 1000)
    ...     return cascading.aggregate(np.ones(1000, np.float32))
    >>> mean = mpicomp.run_local(4, average_ones)[0]
    >>> bool(abs(mean).min() > 1000), bool(0.4 < (mean > 0).mean() < 0.6)  # of 1; half of the signs are wrong
    (True, True)
    """

    normalise: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        flag(self, "normalise")
        integer(self, "seed")

    estimates_mean: ClassVar[bool] = False
    """False: the noise grows from hop to hop."""

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Partial sums x stochastic sign x decoding and encoding on every hop."""
        codec, model = StochasticSign(), self.message_model(spec.n, spec.dtype, comm.size, 0)
        topology = comm.select(model.nbytes(spec.n, 1))
        program = comm.routes.program(topology, spec.n, model.alignment, model.piece_elements)
        stream = Stream(self.seed, spec.vector_id, "stochastic sign")
        sums = PartialSums(codec, stream, comm.rank, program, spec.dtype, self.normalise)
        return Parts(sums, Cascade(comm, program, sums.held, sums.landing))

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        # one message a chunk, with one norm
        codec = StochasticSign()
        return MessageModel(codec.nbytes, n + codec.alignment, codec.alignment)
