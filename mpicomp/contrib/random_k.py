"""Random-k: all ranks draw the same elements, and send only their values.

    I      = one element of each `rate`, the same on all ranks
    v      = mean over ranks of (m + g)[I]
    m      <- m + beta (g - (m + g at I, else 0))
    result = v at I, 0 elsewhere

Values are not scaled up, since the residual m returns the omitted elements later. Random-k is the baseline for any
other choice of shared indices.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import integer
from mpicomp.feedback.memory import Memory
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.choosers import Chooser, DrawnPlaces
from mpicomp.reducers.families import SharedIndices


@method("random-k", Learned(Grade.COMPARED, "sends elements without looking at them"), forms=({"rate": 10},))
@dataclass(frozen=True)
class RandomK(SharedIndices):
    """Options of random-k with error feedback: all ranks draw the same elements, and send only their values.

    Parameters
    ----------
    rate, beta, warmup_steps
        As in `ScaleCom`.
    seed : int
        Seed of the indices; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv 1809.07599).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     random_k = mpicomp.RandomK(rate=10).start(comm, 100)
    ...     return random_k.aggregate(np.ones(100, np.float32))
    >>> float(mpicomp.run_local(2, step)[0].sum())  # one element of each ten
    10.0
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer(self, "seed")

    @override
    def chooser(self, comm: Communicator, spec: VectorSpec, memory: Memory) -> Chooser:
        return DrawnPlaces(memory, Stream(self.seed, spec.vector_id, "indices"))

    @override
    def index_bits(self, chunk: int) -> int:
        return 0
