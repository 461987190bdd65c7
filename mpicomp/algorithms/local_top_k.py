"""Local top-k: each rank sends its own largest elements, with error feedback.

    p_m = g_m + e_m;   q_m = the largest of each chunk of p_m, 0 elsewhere;   e_m <- p_m - q_m;   result = mean_m q_m

Every rank picks its own places, so payloads can only be gathered, and the result has up to M times as many nonzero
elements as a payload. `mpicomp.ScaleCom` avoids this gradient build-up.

With a momentum of each rank, u_m <- momentum u_m + g_m takes the place of g_m; with masking, u_m becomes 0 where
elements are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from collectives import Communicator
from collectives.annotations import Array, override
from mpicomp.aggregator.algorithm import Parts, VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import masked_momentum
from mpicomp.feedback.base import Residual
from mpicomp.feedback.codes import GatheredCodes
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.all_gather import all_gather
from mpicomp.reducers.families import TopKMethod


@method(
    "local-top-k", Learned(Grade.COMPARED, "sends more with every rank, which scalecom does not"), forms=({"rate": 10},)
)
@dataclass(frozen=True)
class LocalTopK(TopKMethod):
    """Options of local top-k: each rank sends its own largest elements, with error feedback.

    Parameters
    ----------
    rate : int
        Number of elements per element that is sent.
    chunk : int, optional
        Number of elements of which the chunk / rate largest are sent, a multiple of `rate`. None: `rate`.
    momentum, masking
        As in `ScaleCom`.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017 (arXiv 1704.05021); the name is
    that of Chen et al., "ScaleCom", NeurIPS 2020 (arXiv 2104.11125). Momentum and masking: Lin et al., "Deep gradient
    compression", ICLR 2018 (arXiv 1712.01887).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def train(comm):
    ...     top_k, gradient = mpicomp.LocalTopK(rate=2).start(comm, 2), np.array([4.0, 3.0], np.float32)
    ...     return [top_k.aggregate(gradient).tolist() for step in range(2)]
    >>> mpicomp.run_local(2, train)[0]
    [[4.0, 0.0], [0.0, 6.0]]
    """

    momentum: float = 0.0
    masking: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        masked_momentum(self)

    @property
    @override
    def estimates_mean(self) -> bool:
        return not self.momentum

    @override
    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        if not self.momentum:
            return super().parts(comm, spec)
        codes = partial(_MomentumCodes, spec=spec, momentum=self.momentum, masking=self.masking)
        return all_gather(comm, spec, self.codec_for(spec.dtype, ()), self.error_rule, feedback=codes)

    @property
    @override
    def error_rule(self) -> ErrorFeedback:
        return ErrorFeedback()


class _MomentumCodes(GatheredCodes):
    """Codes of a momentum, which is cleared where elements are sent."""

    def __init__(self, *arguments: Any, spec: VectorSpec, momentum: float, masking: bool) -> None:
        super().__init__(*arguments)
        kind = spec.compute.type
        self._momentum = self.residuals["momentum"] = Residual(self.device, spec.n, kind, pending=False)
        self._fraction, self._masks = kind(momentum), masking

    @override
    def _part(self, cut: range) -> Array:
        piece = slice(cut.start, cut.stop)
        g, old, out = self._values[piece], self._momentum.current[piece], self._momentum.following[piece]
        self.launch(self.kernels.arrays.compensate, g, old, self._fraction, out)
        return out

    @override
    def _encode(self, piece: int, cut: range) -> None:
        super()._encode(piece, cut)
        if self._masks:
            codec: Any = self._mine.codec
            part = self._momentum.following[cut.start : cut.stop]
            self.launch(codec.clear_sent, self._payloads.there[piece], part)
