"""PowerSGD: ranks average two thin factors of each matrix of gradients, instead of the matrix.

    M_m    = G_m + E_m
    P      = orthonormal(mean_m M_m Q)
    Q      = mean_m M_m^T P
    E_m    <- M_m - P Q^T;   result = P Q^T;   Q <- orthonormal(Q)

M is a tensor as a matrix of shape (first, rest). Vectors and small matrices are averaged as they are. Both means are
sums in full precision, so the traffic does not grow with the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from collectives import Communicator
from collectives.annotations import override
from collectives.dense.allreduce import PIECE_BYTES
from collectives.execution.jobs import in_parts
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer, Round
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import integer
from mpicomp.feedback import nonfinite
from mpicomp.feedback.low_rank import LowRank, cut_into_blocks
from mpicomp.feedback.rounds import Work
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.choosers import BRIEF_ELEMENTS
from mpicomp.reducers.full_precision_mean import FullPrecisionMean

_MOST_RANK = 1024
USUAL_SIDE = 1024  # rows and columns of the matrices that `message_model` assumes


@method(
    "power-sgd",
    Learned(Grade.PROMISING, "had dense's accuracy in the one training that was tried"),
    forms=({"rank": 2, "start_step": 1},),
)
@dataclass(frozen=True)
class PowerSGD(Algorithm):
    """Options of PowerSGD: two thin factors of each matrix of gradients are averaged instead of the matrix.

    It needs the tensors' shapes, which the optimizer and the DDP hook of `mpicomp.torch` pass; your own code passes
    ``tensor_shapes`` to `start`. Tensors without a shape count as matrices as near to a square as possible.

    Parameters
    ----------
    rank : int
        Number of columns of each factor. A matrix of r x c elements takes rank (r + c) numbers. Vectors, and matrices
        that have no more elements than that, are sent as they are.
    start_step : int
        Number of steps at the beginning that are dense and leave no residual.
    seed : int
        Seed of the first right factors; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization",
    NeurIPS 2019 (arXiv 1905.13727).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> with mpicomp.Communicator() as comm:
    ...     power = mpicomp.PowerSGD(rank=1, start_step=0).start(comm, 32 * 16, tensor_shapes=[(32, 16)])
    ...     gradient = np.outer(np.arange(32), np.arange(16)).astype(np.float32)
    ...     mean = power.aggregate(gradient.reshape(-1))
    >>> bool(np.allclose(mean, gradient.reshape(-1), atol=1e-3))
    True
    """

    rank: int = 4
    start_step: int = 2
    seed: int = 0

    symbols = MappingProxyType({"r": "rank"})

    def __post_init__(self) -> None:
        integer(self, "rank", 1, _MOST_RANK)
        integer(self, "start_step", 0)
        integer(self, "seed")

    uses_tensor_lengths: ClassVar[bool] = True

    @override
    def shard_alignment(self, n: int, dtype: str) -> None:
        return None  # matrices stay whole

    @override
    def is_dense(self, step: int) -> bool:
        return step < self.start_step

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Low-rank feedback x full precision x two dense means."""
        blocks = list(cut_into_blocks(spec.n, spec.tensor_lengths, spec.tensor_shapes, self.rank))
        stream = Stream(self.seed, spec.vector_id, "factors")
        feedback = LowRank(spec.n, spec.dtype, blocks, stream, nonfinite.largest(spec.dtype))
        dense = FullPrecisionMean(comm, spec) if self.start_step else None
        return Parts(feedback, _FactorMeans(), dense)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        # both messages in one, of square matrices as models have them: one alone would promise too much
        side = min(math.sqrt(max(n, 1)), USUAL_SIDE)
        itemsize, share = 8 if dtype == "float64" else 4, min(1.0, 2 * self.rank / side)
        longest = int(PIECE_BYTES / (itemsize * share))
        return MessageModel(lambda elements, weight: itemsize * math.ceil(share * elements), longest)


class _FactorMeans(Reducer):
    """Reducer that averages the numbers of each round."""

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        assert work.numbers is not None
        assert work.pieces is not None
        to_encode, to_decode = work.pieces
        yield from _work_on(call, "seconds_encoding", work.encode, to_encode)
        encoded()
        values, mean = work.numbers()
        yield from call.group.dense_steps(call, values, values.dtype.name, True, mean, call.traffic)
        yield from _work_on(call, "seconds_decoding", work.decode, to_decode)


def _work_on(call: VectorCall, phase: str, work: Work, pieces: int) -> Iterator[bool]:
    workers = call.group.workers if call.spec.n > BRIEF_ELEMENTS else None
    start = call.traffic.clock()
    yield from in_parts(call, call.traffic, phase, work, range(pieces), workers)
    call.traffic.seconds_total += call.traffic.clock() - start
