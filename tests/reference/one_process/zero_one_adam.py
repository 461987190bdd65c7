"""0/1 Adam with all its ranks in one process, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Ring
from mpicomp import Dense, DoubleSqueeze
from tests.reference.one_process.simulation import simulation

Vectors = NDArray[Any]


class ZeroOneAdamOneProcess:
    """One bucket, in float64, all of whose elements have the options of one group, with decoupled weight decay.

    Counters follow the text of the paper: they are kept from step to step, not computed from its number.

    Attributes
    ----------
    x : float64[size, n]
        Model of each rank.
    """

    def __init__(
        self,
        x: Vectors,
        size: int,
        compressor: str,
        bucket_index: int,
        preconditioned: bool,
        warmup_steps: int,
        variance_doubling: int,
        local_doubling: int,
        most_local_steps: int,
        group: dict[str, Any],
    ) -> None:
        self.x, self.group, self.preconditioned = np.tile(x, (size, 1)), group, preconditioned
        self.warmup_steps, self.doublings = warmup_steps, (variance_doubling, local_doubling)
        self.most_local_steps = most_local_steps
        self.m, self.v, self.u = np.zeros_like(self.x), np.zeros_like(x), np.zeros_like(self.x)
        self.t, self.k_v, self.k_u, self.variance_steps, self.rates = 0, 1, 1, 0, 0.0
        self.where = Ring(), size, x.size, x.dtype.type, (), bucket_index
        self.dense, self.compressor = simulation(Dense(), *self.where), compressor
        self.squeeze = simulation(DoubleSqueeze(compressor), *self.where)

    def step(self, gradients: Sequence[Vectors]) -> None:
        """Row m is rank m's gradient."""
        self.t += 1
        if self.t <= self.warmup_steps:
            self.together(np.array(gradients))
            if self.t == self.warmup_steps:  # residuals start again
                self.squeeze = simulation(DoubleSqueeze(self.compressor), *self.where)
        else:
            self.alone(np.array(gradients))

    def together(self, g: Vectors) -> None:
        (beta1, beta2), eps = self.group["betas"], self.group["eps"]
        exact = self.t % self.k_v == 0
        if exact:
            mean = self.dense.step(g)
        else:
            seen = self.v > 0
            factor = np.sqrt(self.v) + eps if self.preconditioned else np.ones_like(self.v)
            mean = self.squeeze.step(g / factor * seen) * factor * seen
        self.m = beta1 * self.m + (1 - beta1) * mean
        if exact:
            self.v = beta2 * self.v + (1 - beta2) * mean**2
            self.variance_steps += 1
            if self.variance_steps == self.doublings[0]:
                self.k_v, self.variance_steps = 2 * self.k_v, 0
        self.x -= self.group["lr"] * (self.m / (np.sqrt(self.v) + eps) + self.group["weight_decay"] * self.x)

    def alone(self, g: Vectors) -> None:
        n, beta1, lr = self.t - self.warmup_steps, self.group["betas"][0], self.group["lr"]
        root, seen = np.sqrt(self.v) + self.group["eps"], self.v > 0
        self.m = beta1 * self.m * seen + (1 - beta1) * g
        s = lr * (self.m / root + self.group["weight_decay"] * self.x) * seen
        self.x, self.u, self.rates = self.x - s, self.u + s, self.rates + lr
        if n % self.k_u == 0:
            factor = 1 if self.preconditioned else root
            mean = self.squeeze.step(self.u * factor) / factor * seen
            self.x = self.x + self.u - mean
            self.m = np.tile(mean * root / self.rates, (len(g), 1))
            self.u, self.rates = np.zeros_like(self.x), 0.0
        if n % self.doublings[1] == 0:
            self.k_u = min(2 * self.k_u, self.most_local_steps)
