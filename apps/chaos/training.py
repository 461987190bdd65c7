"""A small training whose every bit depends on every result before: ranks and the reference make the same steps."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.chaos.case import Case
from collectives import Communicator
from mpicomp.algorithms import Aggregator

RATE, NOISE = 0.2, 0.3


class Projections(NamedTuple):
    """Vectors of a step times one random vector, in double precision: sums of them must balance."""

    vector: float
    result: float
    residual: float


class Training:
    """Least squares by one rank; `model` converges to a random target, from noisy gradients."""

    def __init__(self, case: Case, number: int) -> None:
        self._case, self._number = case, number  # the noise depends on the rank at the beginning of the job
        draw = np.random.default_rng(case.seed)
        self._target = draw.standard_normal(case.n).astype(np.float32)
        self._signs = draw.choice(np.array([-1.0, 1.0]), case.n)
        self.model: NDArray[np.float32] = np.zeros(case.n, np.float32)

    def start(self, comm: Communicator) -> Aggregator:
        """Return the aggregator of the case's method."""
        return mpicomp.algorithm(self._case.method, **self._case.options).start(comm, self._case.n)

    def vector(self, step: int) -> NDArray[np.float32]:
        """Return this rank's contribution to a step."""
        noise = np.random.default_rng([self._case.seed, self._number, step]).standard_normal(self._case.n, np.float32)
        return np.float32(RATE) * (self.model - self._target + np.float32(NOISE) * noise)

    def apply(self, result: NDArray[np.float32]) -> None:
        """Make a step."""
        self.model = self.model - result

    @property
    def digest(self) -> int:
        """Checksum of the model."""
        return zlib.crc32(self.model.tobytes())

    @property
    def loss(self) -> float:
        """Mean squared distance from the target; 1 or so at the beginning."""
        return float(np.mean(np.square(self.model - self._target), dtype=np.float64))

    def project(self, vector: Any, result: Any, aggregator: Aggregator) -> Projections:
        """Return the projections of a step that has just ended."""
        residual = aggregator.residual
        return Projections(
            *(0.0 if one is None or not one.size else float(self._signs @ one) for one in (vector, result, residual))
        )
