"""SparseLoCo: each rank sends the largest elements of each chunk in two bits; the residual decays.

    e_m    <- decay e_m + u_m
    v_m     = the 1/rate largest |e_m| of each chunk, in four levels per tensor; 0 elsewhere
    e_m    <- e_m - v_m
    result  = alpha mean_m v_m

u_m is the movement of the local optimizer in `local_steps` steps. The decay takes the part of an outer momentum.
Codes are gathered, not reduced: (M - 1) messages arrive at each rank. So against a dense ring the traffic shrinks by
2 / M of the factor by which messages are shorter than the vector.

Reference: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv 2508.15706.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, Synchronize, VectorSpec
from mpicomp.codecs.options import adopt, number
from mpicomp.codecs.sparse_levels import SparseLevels, represents
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.feedback.scale_groups import padded_lengths
from mpicomp.reducers.all_gather import all_gather, gathered_model


@dataclass(frozen=True)
class SparseLoCo(Algorithm):
    """Options of SparseLoCo.

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
        adopt(self, self.codec(None))

    @property
    def uses_tensor_lengths(self) -> bool:
        """True: each tensor has chunks and levels of its own."""
        return True

    @property
    def estimates_mean(self) -> bool:
        """True unless a part of the residual decays, or `alpha` scales the result."""
        return self.decay == 1 and self.alpha == 1

    def codec(self, lengths: tuple[int, ...] | None) -> SparseLevels:
        """Return the codec of the options for tensors of these lengths, or for one."""
        return SparseLevels(self.rate, self.chunk, self.bits, lengths, self.alpha)

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Decaying error feedback x largest elements in levels x all-gather."""
        lengths, _ = padded_lengths(spec.tensor_lengths, spec.n)
        codec = self.codec(tuple(lengths.tolist()) if spec.n else ())
        return all_gather(comm, spec, codec, ErrorFeedback(self.decay))

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return gathered_model(self.codec((n,) if n else ()), n, piece_bytes)
