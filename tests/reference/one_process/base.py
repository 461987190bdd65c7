"""What the simulations of methods share: all ranks of a run, and sums over the tensors of their vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Ring
from collectives.schedules.plan import Topology
from mpicomp.kernels.streams import Stream
from tests.reference.one_process.allreduce import rounded
from tests.reference.signs import BLOCK

Vectors = NDArray[Any]


class Simulation(ABC):
    """All ranks of a run of a method; row m of every array is rank m's.

    Parameters
    ----------
    options : Algorithm
    topology : Topology or None
        None: small vectors under "auto", of which every rank gets every other's; sums go round the ring then.
    size, n : int
        Ranks and elements.
    dtype : type or "bfloat16"
        Of the vectors; the results of "bfloat16" are float32.
    lengths : tuple of int
        Of the tensors, each padded to a multiple of 64, the last up to the vector's end; () is one tensor.
    vector_id : int

    Attributes
    ----------
    residuals : ndarray[size, n]
    t : int
        Steps taken.
    """

    def __init__(
        self,
        options: Any,
        topology: Topology | None,
        size: int,
        n: int,
        dtype: Any = np.float32,
        lengths: tuple[int, ...] = (),
        vector_id: int = 0,
    ) -> None:
        self.options, self.vector_id, self.size, self.n, self.dtype = options, vector_id, size, n, dtype
        self.gathers, self.topology = topology is None, topology or Ring()
        self.compute = np.float64 if dtype == np.float64 else np.float32
        self.residuals = np.zeros((size, n), self.compute)
        self.lengths = np.array(lengths or (n,))
        padded = -(-self.lengths // 64) * 64
        self.starts = np.cumsum(padded) - padded
        self.t = 0

    def step(self, vectors: Vectors) -> Vectors:
        """Take one step: row m is rank m's vector. Return the result that every rank gets."""
        result = self.compute_step(vectors.astype(self.compute))
        self.t += 1
        return rounded(result, self.dtype)

    @abstractmethod
    def compute_step(self, g: Vectors) -> Vectors:
        """One step in float32 or float64."""

    def state(self, rank: int) -> dict[str, Vectors]:
        """Return the vectors that a rank keeps, by the names of `state_dict`."""
        return {}

    def shares(self) -> dict[str, Vectors]:
        """Return what the ranks keep together, each a part: by the names of `state_dict`, all parts."""
        return {}

    def stream(self, purpose: str) -> Stream:
        """The stream of random words for this purpose."""
        return Stream(getattr(self.options, "seed", 0), self.vector_id, purpose)

    def spread(self, of_segment: Vectors) -> Vectors:
        """Each tensor's number for each of its elements."""
        out = np.zeros(self.n, of_segment.dtype)
        for start, length, value in zip(self.starts, self.lengths, of_segment, strict=True):
            out[start : start + length] = value
        return out

    def blocks(self, segment: int) -> Iterator[slice]:
        """Blocks are counted from the vector's start and end where a tensor does."""
        start = int(self.starts[segment])
        end = start + int(self.lengths[segment])
        while start < end:
            stop = min(end, start - start % BLOCK + BLOCK)
            yield slice(start, stop)
            start = stop

    def totals(self, rows: Vectors, sums: Any) -> NDArray[np.float64]:
        """Per rank and tensor, the blocks' sums in index order; `sums` makes them, given elements and their start."""
        out = np.zeros((self.size, self.lengths.size))
        for rank in range(self.size):
            for segment in range(self.lengths.size):
                for block in self.blocks(segment):
                    out[rank, segment] += sums(rows[rank, block], block.start)
        return out
