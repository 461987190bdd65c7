"""Dense: the exact mean, uncompressed. The baseline all methods are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.dense.allreduce import PIECE_BYTES
from collectives.dense.payload import SIXTEEN_BIT
from mpicomp.aggregator.base import MessageModel, Synchronize, VectorAggregator
from mpicomp.aggregator.nonfinite import all_finite_result, raise_non_finite
from mpicomp.kernels.cpu.sign import all_finite


@dataclass(frozen=True)
class Dense:
    """Mean over ranks in full precision (parallel SGD, "PSGD")."""

    synchronize: ClassVar[Synchronize] = "gradients"
    uses_tensor_lengths: ClassVar[bool] = False

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> DenseAggregator:
        """See `Algorithm.start`."""
        return DenseAggregator(self, comm, n, dtype, vector_id)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: 16-bit elements travel as float32 until their sum is complete."""
        summing = 8 if dtype == "float64" else 4
        complete = 2 if dtype in SIXTEEN_BIT else summing
        return MessageModel(
            lambda elements, weight: elements * (complete if weight == ranks else summing), PIECE_BYTES // summing
        )


class DenseAggregator(VectorAggregator):
    """Keeps nothing but the step counter."""

    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        # a widened copy is looked at now, as the sums will take its place
        widened_bad = None if self._wide is None else not all_finite(values)
        self.comm.dense(values, self.dtype, True, out, traffic)
        if not all_finite_result(out, self.dtype):
            bad = not all_finite(values) if widened_bad is None else widened_bad
            raise_non_finite(self.comm, bad, f"vector {self.vector_id}, step {self.step}")
