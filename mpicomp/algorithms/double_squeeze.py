"""DoubleSqueeze and MEM-SGD: error feedback on both passes, or on the first alone.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send Q(v);     d <- v - Q(v)
    result:   Q(v)

The owner is a parameter server (topology "star") or, elsewhere, each rank for its part of the vector. MEM-SGD sends the
mean itself on the second pass. Q needs no unbiasedness.

References: Tang, Yu, Lian, Zhang, Liu, "DoubleSqueeze: parallel stochastic gradient descent with double-pass
error-compensated compression", ICML 2019; Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator
from collectives.arrays import narrow, widen
from mpicomp.algorithms.base import Synchronize, Wire
from mpicomp.algorithms.coded import piece_elements
from mpicomp.algorithms.feedback import ErrorFeedback, Feedback
from mpicomp.algorithms.squeezed import SqueezedAggregator
from mpicomp.codecs.base import Bytes, Codec, Draw, check_size
from mpicomp.codecs.compressors import compressor
from mpicomp.codecs.one_bit import OneBit

_DEFAULT = OneBit(1 << 15)


@dataclass(frozen=True, slots=True)
class Uncompressed:
    """Values as they are; float32 ones as 16 bits where the vector has them."""

    dtype: str

    @property
    def alignment(self) -> int:
        """Elements."""
        return 64

    @property
    def _stored(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)

    def nbytes(self, n: int, weight: int = 1) -> int:
        """As many as the vector has."""
        return n * self._stored.itemsize

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Nothing is drawn."""
        check_size(self, payload, values.size, 1)
        stored = payload.view(self._stored)
        if self._stored.itemsize == 2:
            narrow(values, self.dtype, stored)
        else:
            stored[:] = values

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Exact."""
        check_size(self, payload, values.size, weight)
        stored = payload.view(self._stored)
        if self._stored.itemsize == 2:
            widen(stored, self.dtype, values)
        else:
            values[:] = stored


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
        No such compressor, or one of its options is out of range.
    """

    compressor: Codec | str = _DEFAULT
    seed: int = 0

    synchronize: ClassVar[Synchronize] = "gradients"

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", compressor(self.compressor))

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
        segments: Sequence[int] | None = None,
    ) -> SqueezedAggregator:
        """See `Algorithm.start`; segments play no part."""
        second, owners = self.second(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
        codec = compressor(self.compressor)
        return SqueezedAggregator(self, comm, n, dtype, vector_id, codec, second, ErrorFeedback(), owners, self.seed)

    def wire(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> Wire:
        """See `Algorithm.wire`."""
        codec, (second, _) = compressor(self.compressor), self.second(dtype)
        return Wire(
            lambda elements, weight: second.nbytes(elements) if weight == ranks else codec.nbytes(elements),
            piece_elements(codec, n, piece_bytes, second),
            codec.alignment,
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
        return Uncompressed(dtype), None
