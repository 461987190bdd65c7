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

from collectives.annotations import override
from mpicomp.algorithms.families import GatheringMethod
from mpicomp.codecs.options import adopt
from mpicomp.codecs.top_k import TopK
from mpicomp.feedback.error_feedback import ErrorFeedback


@dataclass(frozen=True)
class TopKSGD(GatheringMethod):
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
        adopt(self, self.codec_for("float32", ()))

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> TopK:
        return TopK(self.rate, self.chunk, dtype == "float64")


@dataclass(frozen=True)
class LocalTopK(TopKSGD):
    """Options of local top-k: as `TopKSGD`, with error feedback."""

    @property
    @override
    def error_rule(self) -> ErrorFeedback:
        return ErrorFeedback()
