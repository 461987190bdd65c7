"""Top-k SGD: each rank sends its own largest elements, without error feedback: the baseline of error feedback.

    q_m = the largest of each chunk of g_m, 0 elsewhere;   result = mean_m q_m

Elements that are not sent are lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.reducers.families import TopKMethod


@method("top-k-sgd", Learned(Grade.COMPARED, "ended with a greater loss than dense"), forms=({"rate": 10},))
@dataclass(frozen=True)
class TopKSGD(TopKMethod):
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
