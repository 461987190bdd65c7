"""Dense: the exact mean, uncompressed. The baseline all methods are measured against."""

from __future__ import annotations

from dataclasses import dataclass

from collectives import Communicator
from collectives.dense.allreduce import PIECE_BYTES
from collectives.memory import SIXTEEN_BIT
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.reducers.full_precision_mean import FullPrecisionMean


@dataclass(frozen=True)
class Dense(Algorithm):
    """Mean over ranks in full precision (parallel SGD, "PSGD")."""

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Nothing is kept, and nothing compressed."""
        return Parts(None, FullPrecision(spec.dtype), FullPrecisionMean(comm))

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: 16-bit elements travel as float32 until their sum is complete."""
        summing = 8 if dtype == "float64" else 4
        complete = 2 if dtype in SIXTEEN_BIT else summing
        return MessageModel(
            lambda elements, weight: elements * (complete if weight == ranks else summing), PIECE_BYTES // summing
        )
