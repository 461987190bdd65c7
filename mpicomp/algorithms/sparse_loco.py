"""SparseLoCo: each rank sends the largest elements of each chunk in two bits; the residual decays.

    e_m    <- decay e_m + u_m
    v_m     = the 1/rate largest |e_m| of each chunk, in four levels per tensor; 0 elsewhere
    e_m    <- e_m - v_m
    result  = alpha mean_m v_m

u_m is the movement of the local optimizer in `local_steps` steps. The decay takes the part of an outer momentum.
Codes are gathered, not reduced: (M - 1) messages arrive at each rank. So against a dense ring the traffic shrinks by
2 / M of the factor by which messages are shorter than the vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from collectives.annotations import override
from mpicomp.aggregator.algorithm import Synchronize
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import adopt, number
from mpicomp.codecs.sparse_levels import SparseLevels, represents
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.families import GatheringMethod


@method(
    "sparse-loco",
    Learned(Grade.BEHIND, "ended behind dense after 10 synchronizations; it is for long trainings"),
    forms=({}, {"rate": 10, "chunk": 200, "bits": 32, "decay": 1.0}),
)
@dataclass(frozen=True)
class SparseLoCo(GatheringMethod):
    """Options of SparseLoCo: the largest elements of each chunk in two bits, and a residual that decays.

    Parameters
    ----------
    rate : int
        Number of elements per element that is sent.
    chunk : int
        Number of elements of which the chunk / rate largest are sent, a multiple of `rate`. Chunks count from each
        tensor's start.
    bits : 2 or 32
        Bits of a value: one of four levels per tensor, or float32.
    decay : float
        Fraction of the residual that is kept from one step to the next, 0 to 1. 1 is plain error feedback.
    alpha : float
        Factor of the result; above 0.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo" (arXiv 2508.15706).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     loco = mpicomp.SparseLoCo(rate=2, chunk=4, bits=32).start(comm, 4)
    ...     return loco.aggregate(np.array([4.0, 0.5, -3.0, 0.25], np.float32)), loco.residual
    >>> mpicomp.run_local(2, step)[0]
    (array([ 4.,  0., -3.,  0.], dtype=float32), array([0.  , 0.5 , 0.  , 0.25], dtype=float32))
    """

    rate: int = 64
    chunk: int = 4096
    bits: Literal[2, 32] = 2
    decay: float = 0.95
    alpha: float = 1.0

    synchronize: ClassVar[Synchronize] = "updates"
    symbols: ClassVar[Mapping[str, str]] = MappingProxyType({"beta": "decay"})

    def __post_init__(self) -> None:
        number(self, "decay", "between 0 and 1", lambda decay: 0 <= decay <= 1)
        number(self, "alpha", "a positive number that float32 represents", represents)
        adopt(self, SparseLevels(self.rate, self.chunk, self.bits, None, self.alpha))

    uses_tensor_lengths: ClassVar[bool] = True
    """True: each tensor has chunks and levels of its own."""

    @property
    def estimates_mean(self) -> bool:
        """True unless a part of the residual decays, or `alpha` scales the result."""
        return self.decay == 1 and self.alpha == 1

    @override
    def shard_alignment(self, n: int, dtype: str) -> int:
        return self.chunk  # the codec asks for whole tensors, whose parts count as tensors here

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> SparseLevels:
        return SparseLevels(self.rate, self.chunk, self.bits, lengths, self.alpha)

    @property
    @override
    def error_rule(self) -> ErrorFeedback:
        return ErrorFeedback(self.decay)
