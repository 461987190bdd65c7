"""True top-k: the largest elements of the exact mean. A reference for other choices, which saves no traffic.

    I      = places of the largest |mean over ranks of (m + g)| in each chunk or in the whole vector
    v      = mean over ranks of (m + g)[I]
    m      <- m + beta (g - (m + g at I, else 0))
    result = v at I, 0 elsewhere

The mean takes a dense all-reduce of the whole vector at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import MessageModel, VectorSpec
from mpicomp.aggregator.registration import method
from mpicomp.codecs.options import chunk_or_exact
from mpicomp.feedback.memory import Memory
from mpicomp.reducers.choosers import Chooser, TrueChoice
from mpicomp.reducers.families import SharedIndices
from mpicomp.reducers.full_precision_mean import summed_model


@method("true-top-k", forms=({"rate": 10, "chunk": 30},), advised={})
@dataclass(frozen=True)
class TrueTopK(SharedIndices):
    """Options of true top-k: the largest elements of the exact mean. A reference, which saves no traffic.

    Parameters
    ----------
    rate, beta, warmup_steps, chunk, exact
        As in `ScaleCom`.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     top_k = mpicomp.TrueTopK(rate=2, exact=True).start(comm, 4)
    ...     gradient = [4.0, 1.0, -3.0, 0.0] if comm.rank == 0 else [2.0, 9.0, -1.0, 0.0]
    ...     return top_k.aggregate(np.array(gradient, np.float32))
    >>> mpicomp.run_local(2, step)[0]
    array([3., 5., 0., 0.], dtype=float32)
    """

    chunk: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        chunk_or_exact(self, (self.rate,))

    @property
    @override
    def chunks(self) -> tuple[int | None, bool]:
        return self.chunk, self.exact

    @override
    def chooser(self, comm: Communicator, spec: VectorSpec, memory: Memory) -> Chooser:
        return TrueChoice(memory)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        # all elements travel in full precision; the few values of the second mean are left out
        return summed_model("float64" if dtype == "float64" else "float32", ranks)
