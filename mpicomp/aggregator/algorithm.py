"""A method: options, and the parts that they mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from collectives import Communicator
from mpicomp.aggregator.arguments import vector_spec
from mpicomp.aggregator.base import Aggregator
from mpicomp.aggregator.parts import MessageModel, Parts, Reducer, StateKind, Synchronize, VectorSpec
from mpicomp.aggregator.rehearsal import compile_kernels

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

    @property
    def estimates_mean(self) -> bool:
        """Whether results are estimates of the ranks' mean; where not, the caller scales them, or they have a past."""
        return True

    def encodes_on_devices(self, dtype: str) -> bool:
        """Whether vectors of this type on GPUs can be encoded where they lie."""
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
        dtype: Any = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
        device: Any = "cpu",
    ) -> Aggregator:
        """State for vectors of one length.

        Parameters
        ----------
        comm : Communicator
        n : int
            Elements.
        dtype : dtype or str
            Of the vectors: float16, bfloat16, float32 or float64, as NumPy, torch or text names it.
        vector_id : int
            Tells vectors under one seed apart, so that they do not share random numbers.
        tensor_lengths : sequence of int, optional
            Lengths of parts, such as tensors, that get scales of their own. Each begins at a multiple of 64 elements:
            behind the one before, padded with zeros, which do not count.
        device : str or torch.device
            Where vectors are encoded: "cpu", whatever device they are on, or "cuda" or "cuda:1", where they must be. Of
            methods whose `encodes_on_devices` says so of `dtype`. Ranks may have different devices.

        Raises
        ------
        TypeError, ValueError
            An argument cannot be used; the other ranks raise CollectiveMismatch in their next call.
        MemoryError
            The device lacks memory; the others raise CollectiveMismatch in their next call, and all can start again.
        """
        lengths = tensor_lengths if self.uses_tensor_lengths else None
        spec = vector_spec(comm, n, dtype, vector_id, lengths, str(device), self)
        if spec.device == "cpu":
            compile_kernels(self, comm, spec)
            return Aggregator(self, comm, spec)
        try:
            with comm.tags_unused_on_error():
                return Aggregator(self, comm, spec)
        except (RuntimeError, MemoryError) as error:  # PyTorch's is a RuntimeError
            Aggregator(self, comm, replace(spec, device="cpu"))  # takes the tags that the other ranks take
            problem = f"{spec.device} cannot hold what {self} keeps for {spec.n} elements ({error})"
            comm.reject(MemoryError(f"{comm.here}, start: {problem}; free memory there, or leave out device"), "start")
