"""Methods whose ranks send the same elements, with all ranks in one process and plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.schedules.plan import Topology
from mpicomp import RandomK, ScaleCom, TrueTopK
from mpicomp.kernels.streams import Stream
from tests.reference.one_process.allreduce import dense
from tests.reference.sparse import Places, strata, top

Vectors = NDArray[Any]
Options = ScaleCom | RandomK | TrueTopK


class OneProcess:
    """A run of one of them.

    Parameters
    ----------
    options : ScaleCom, RandomK or TrueTopK
    topology : Topology
    size, n : int
        Ranks and elements.
    dtype : type
        Of the vectors.
    tensor_lengths : tuple of int
        Multiples of 64; () is one segment.
    vector_id : int

    Attributes
    ----------
    residuals : ndarray[size, n]
    places : int64[k]
        That the last step sent.
    """

    def __init__(
        self,
        options: Options,
        topology: Topology,
        size: int,
        n: int,
        dtype: Any = np.float32,
        tensor_lengths: tuple[int, ...] = (),
        vector_id: int = 0,
    ) -> None:
        self.options, self.topology, self.size, self.n, self.dtype = options, topology, size, n, dtype
        self.compute = np.float64 if dtype == np.float64 else np.float32
        self.residuals = np.zeros((size, n), self.compute)
        self.tensor_lengths = tensor_lengths
        self.vector_id = vector_id
        self.places: Places = np.zeros(0, np.int64)
        self.t = 0

    def step(self, vectors: Vectors) -> Vectors:
        """Take one step: row m is rank m's vector; returns what every rank gets."""
        t, self.t = self.t, self.t + 1
        if t < self.options.warmup_steps:
            return dense(self.topology, vectors, "mean")
        g, m, beta = vectors.astype(self.compute), self.residuals, self.options.beta
        compensated = g + m
        self.places = self.choose(t, compensated)
        result = np.zeros(self.n, self.dtype)
        # what is summed has the vectors' precision or more, what comes back the vectors'
        result[self.places] = dense(self.topology, compensated[:, self.places], "mean").astype(self.dtype)
        past = self.compute(1 - beta)
        self.residuals = compensated if beta == 1 else past * m + self.compute(beta) * compensated
        self.residuals[:, self.places] = 0 if beta == 1 else (past * m)[:, self.places]
        return result

    def state(self, rank: int) -> dict[str, Vectors]:
        """Return the residual of one rank, by its name in `state_dict`."""
        return {"residual": self.residuals[rank]}

    def choose(self, t: int, compensated: Vectors) -> Places:
        options = self.options
        if isinstance(options, RandomK):
            return strata(Stream(options.seed, self.vector_id, "indices").key(), self.n, options.rate, t)
        if isinstance(options, TrueTopK):
            x, rates = dense(self.topology, compensated, "mean"), (options.rate,)
        else:
            x, rates = compensated[t % self.size], options.rates_of(self.vector_id)
        lengths = self.tensor_lengths if len(rates) > 1 else (self.n,)
        found, start = [], 0
        for length, rate in zip(lengths, rates, strict=True):
            chunk = max(1, length) if options.exact else options.chunk or rate
            keep = -(-length // rate) if options.exact else chunk // rate
            found.append(start + top(x[start : start + length], chunk, keep))
            start += length
        return np.concatenate(found)
