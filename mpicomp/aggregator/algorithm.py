"""A method: options, and the parts that they mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from collectives import Communicator
from mpicomp.aggregator.base import Aggregator
from mpicomp.aggregator.parts import MessageModel, Parts, Reducer, StateKind, Synchronize, VectorSpec

__all__ = ["Algorithm", "MessageModel", "Parts", "Reducer", "StateKind", "Synchronize", "VectorSpec"]


class Algorithm(ABC):
    """Base of a method's options: a frozen dataclass.

    Attributes
    ----------
    synchronize : "updates" or "gradients"
        What it is best given: the local optimizer's updates, or the gradients.
    """

    synchronize: ClassVar[Synchronize] = "gradients"

    @property
    def uses_tensor_lengths(self) -> bool:
        """Whether `tensor_lengths` make a difference; where not, a vector's tensors need no padding between them."""
        return False

    @abstractmethod
    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """What an aggregator for such vectors is composed of."""

    @abstractmethod
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """What travels between `ranks` for vectors of `n`; packed payloads go in pieces of `piece_bytes` at most."""

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> Aggregator:
        """State for vectors of one length.

        Parameters
        ----------
        comm : Communicator
        n : int
            Elements.
        dtype : dtype or "bfloat16"
            Of the vectors: float16, bfloat16, float32 or float64.
        vector_id : int
            Tells vectors under one seed apart, so that they do not share random numbers.
        tensor_lengths : sequence of int, optional
            Lengths of parts, such as tensors, that get scales of their own. Each begins at a multiple of 64 elements:
            behind the one before, padded with zeros, which do not count.
        """
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        lengths = None if tensor_lengths is None or not self.uses_tensor_lengths else tuple(tensor_lengths)
        return Aggregator(self, comm, VectorSpec(n, name, vector_id, lengths))
