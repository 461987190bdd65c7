"""DoubleSqueeze and MEM-SGD: error feedback on both passes, or on the first alone.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send Q(v);     d <- v - Q(v)
    result:   Q(v)

The owner is a parameter server (topology "star") or, elsewhere, each rank for its part of the vector. MEM-SGD sends the
mean itself on the second pass. Q may be biased, but must leave out less than there is (docs/compressors.md): what it
leaves out comes back.

References: Tang, Yu, Lian, Zhang, Liu, "DoubleSqueeze: parallel stochastic gradient descent with double-pass
error-compensated compression", ICML 2019; Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from collectives import Communicator
from collectives.schedules.direct import Direct
from mpicomp.aggregator.base import MessageModel, Synchronize
from mpicomp.codecs.base import Codec
from mpicomp.codecs.error_feedback import ErrorFeedback, Feedback
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.codecs.options import integer
from mpicomp.codecs.registry import compressor
from mpicomp.codecs.scaled_sign import OneBit
from mpicomp.reducers.coded import piece_elements
from mpicomp.reducers.two_pass import TwoPassAggregator

_DEFAULT = OneBit(1 << 15)


@dataclass(frozen=True)
class Squeezing(ABC):
    """Options that both methods have.

    Parameters
    ----------
    compressor : Codec or str
        A codec of `mpicomp.codecs`, or its name and options as in ``"one-bit:bucket=512"``. Buckets are counted from
        the start of the vector, so which rank owns what does not change the result.
    seed : int
        Equal on all ranks.

    Raises
    ------
    ValueError
        No such compressor, or an option is out of range.
    """

    compressor: Codec | str = _DEFAULT
    seed: int = 0

    synchronize: ClassVar[Synchronize] = "gradients"
    uses_tensor_lengths: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", compressor(self.compressor))
        integer(self, "seed")

    @abstractmethod
    def second(self, dtype: str) -> tuple[Codec, Feedback | None]:
        """Of the second pass, for vectors of a type."""

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> TwoPassAggregator:
        """See `Algorithm.start`; tensor_lengths play no part."""
        second, owners = self.second(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
        codec = compressor(self.compressor)
        return TwoPassAggregator(self, comm, n, dtype, vector_id, codec, second, ErrorFeedback(), owners, self.seed)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`."""
        codec, (second, _) = compressor(self.compressor), self.second(dtype)
        return MessageModel(
            lambda elements, weight: second.nbytes(elements) if weight == ranks else codec.nbytes(elements),
            piece_elements(codec, n, piece_bytes, second),
            codec.alignment,
            Direct(),
        )


@dataclass(frozen=True)
class DoubleSqueeze(Squeezing):
    """Options of DoubleSqueeze.

    Parameters
    ----------
    compressor, seed
        As in `Squeezing`; of both passes.
    """

    def second(self, dtype: str) -> tuple[Codec, Feedback | None]:
        """See `Squeezing`."""
        return compressor(self.compressor), ErrorFeedback()


@dataclass(frozen=True)
class MemSGD(Squeezing):
    """Options of MEM-SGD.

    Parameters
    ----------
    compressor, seed
        As in `Squeezing`; of the first pass. The second carries the mean, of 16-bit vectors in 16 bits.
    """

    def second(self, dtype: str) -> tuple[Codec, Feedback | None]:
        """See `Squeezing`."""
        return FullPrecision(dtype), None
