"""Top-k SGD and local top-k: each rank sends its own largest elements, without and with error feedback.

    p_m = g_m + e_m;   q_m = the largest of each chunk of p_m, 0 elsewhere;   e_m <- p_m - q_m;   result = mean_m q_m

`TopKSGD` keeps no e: elements that are not sent are lost. Every rank picks its own places, so payloads can only be
gathered, and the result has up to M times as many nonzero elements as a payload. `mpicomp.ScaleCom` avoids this
gradient build-up.

References: Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Chen et al., "ScaleCom",
NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.codecs.options import adopt
from mpicomp.codecs.top_k import TopK
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.all_gather import all_gather, gathered_model


@dataclass(frozen=True)
class TopKSGD(Algorithm):
    """Options of top-k SGD.

    Parameters
    ----------
    rate : int
        Number of elements per element that is sent.
    chunk : int, optional
        Number of elements of which the chunk / rate largest are sent, a multiple of `rate`. None: `rate`.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    rate: int = 100
    chunk: int | None = None

    def __post_init__(self) -> None:
        adopt(self, self.codec("float32"))

    def codec(self, dtype: DTypeLike | str) -> TopK:
        """Return the codec of the options for vectors of a type."""
        return TopK(self.rate, self.chunk, dtype in ("float64", np.float64))

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return True

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """No feedback x top-k x all-gather."""
        return all_gather(comm, spec, self.codec(spec.dtype), None)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return gathered_model(self.codec(dtype), n, piece_bytes)


@dataclass(frozen=True)
class LocalTopK(TopKSGD):
    """Options of local top-k: as `TopKSGD`, with error feedback."""

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Error feedback x top-k x all-gather."""
        return all_gather(comm, spec, self.codec(spec.dtype), ErrorFeedback())
