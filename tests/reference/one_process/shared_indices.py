"""Methods whose ranks send the same elements, with all ranks in one process and plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicomp import RandomK, ScaleCom, TrueTopK
from tests.reference.one_process.allreduce import dense, rounded
from tests.reference.one_process.base import Simulation, Vectors
from tests.reference.sparse import Places, strata, top

Options = ScaleCom | RandomK | TrueTopK


class OneProcess(Simulation):
    """A run of one of them.

    Attributes
    ----------
    places : int64[k]
        That the last step sent.
    """

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.places: Places = np.zeros(0, np.int64)
        self.momenta = np.zeros((self.size, self.n), self.compute)

    def compute_step(self, g: Vectors) -> Vectors:
        if self.t < self.options.warmup_steps:
            return dense(self.topology, g, "mean")
        m, beta, momentum = self.residuals, self.options.beta, getattr(self.options, "momentum", 0)
        self.momenta = self.momenta * self.compute(momentum) + g if momentum else g
        compensated = self.momenta + m
        self.places = self.choose(compensated)
        # sums have the vectors' precision or more, results that of the vectors
        means = rounded(dense(self.topology, compensated[:, self.places], "mean"), self.dtype)
        result = np.zeros(self.n, means.dtype)
        result[self.places] = means
        past = self.compute(1 - beta)
        self.residuals = compensated if beta == 1 else past * m + self.compute(beta) * compensated
        self.residuals[:, self.places] = 0 if beta == 1 else (past * m)[:, self.places]
        if getattr(self.options, "masking", False):
            self.momenta[:, self.places] = 0
        return result

    def state(self, rank: int) -> dict[str, Vectors]:
        found = {"residual": self.residuals[rank]}
        return found | {"momentum": self.momenta[rank]} if getattr(self.options, "momentum", 0) else found

    def choose(self, compensated: Vectors) -> Places:
        options: Options = self.options
        if isinstance(options, RandomK):
            return strata(self.stream("indices").key(), self.n, options.rate, self.t)
        if isinstance(options, TrueTopK):
            x, rates = dense(self.topology, compensated, "mean"), (options.rate,)
        else:
            x, rates = compensated[self.t % self.size], options.rates_of(self.vector_id)
        lengths = self.lengths.tolist() if len(rates) > 1 else [self.n]
        found, start = [], 0
        for length, rate in zip(lengths, rates, strict=True):
            chunk = max(1, length) if options.exact else options.chunk or rate
            keep = -(-length // rate) if options.exact else chunk // rate
            found.append(start + top(x[start : start + length], chunk, keep))
            start += length
        return np.concatenate(found)
