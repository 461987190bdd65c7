"""Top-k SGD and local top-k: each rank sends its own largest elements, without and with error feedback.

    p_m = g_m + e_m;   q_m = the largest of each chunk of p_m, 0 elsewhere;   e_m <- p_m - q_m;   result = mean_m q_m

`TopKSGD` keeps no e: elements that are not sent are lost. Every rank picks its own places, so payloads can only be
gathered, and the result has up to M times as many nonzero elements as a payload. `mpicomp.ScaleCom` avoids this
gradient build-up.
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
    """Options of top-k SGD: each rank sends its own largest elements; the others are lost.

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

    References
    ----------
    Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017 (arXiv 1704.05021).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     top_k = mpicomp.TopKSGD(rate=2).start(comm, 4)
    ...     gradient = [4.0, 1.0, -3.0, 0.0] if comm.rank == 0 else [2.0, 9.0, -1.0, 0.0]
    ...     return top_k.aggregate(np.array(gradient, np.float32))
    >>> mpicomp.run_local(2, step)[0]
    array([ 2. ,  4.5, -2. ,  0. ], dtype=float32)
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
    """Options of local top-k: as `TopKSGD`, with error feedback.

    Parameters
    ----------
    rate, chunk
        As in `TopKSGD`.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017 (arXiv 1704.05021); the name is
    that of Chen et al., "ScaleCom", NeurIPS 2020 (arXiv 2104.11125).

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

    @property
    @override
    def error_rule(self) -> ErrorFeedback:
        return ErrorFeedback()
