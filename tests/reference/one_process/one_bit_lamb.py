"""1-bit LAMB with all its ranks in one process, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Ring
from mpicomp import Dense, DoubleSqueeze
from tests.reference.one_process.simulation import simulation

Vectors = NDArray[Any]


class OneBitLambOneProcess:
    """Tensors in float64, each of which is a bucket of its own; decoupled weight decay.

    Attributes
    ----------
    x : list of float64[n]
        The model.
    """

    def __init__(
        self, x: Sequence[Vectors], size: int, compressor: str, warmup_steps: int, group: dict[str, Any]
    ) -> None:
        self.x, self.group, self.warmup_steps, self.t = [one.copy() for one in x], group, warmup_steps, 0
        self.m, self.v = [np.zeros_like(one) for one in x], [np.zeros_like(one) for one in x]
        self.c, self.f = [0.0] * len(x), [1.0] * len(x)
        where = [(Ring(), size, one.size, one.dtype.type, (), k) for k, one in enumerate(x)]
        self.dense = [simulation(Dense(), *one) for one in where]
        self.squeeze = [simulation(DoubleSqueeze(compressor), *one) for one in where]

    def step(self, gradients: Sequence[Sequence[Vectors]]) -> None:
        """Row m is rank m's gradients."""
        self.t += 1
        if self.t == self.warmup_steps + 1:
            self.z = [v.copy() for v in self.v]
            sizes = [np.sqrt(np.mean(m**2)) for m in self.m]
            self.s = [np.mean(sizes) / one for one in sizes]
        for k in range(len(self.x)):
            own = np.array([of_rank[k] for of_rank in gradients])
            (self.warm if self.t <= self.warmup_steps else self.compressed)(k, own)

    def warm(self, k: int, own: Vectors) -> None:
        (beta1, beta2), decay = self.group["betas"], self.group["weight_decay"]
        g = self.dense[k].step(own)
        self.m[k] = beta1 * self.m[k] + (1 - beta1) * g
        self.v[k] = beta2 * self.v[k] + (1 - beta2) * g**2
        u = self.m[k] / (np.sqrt(self.v[k]) + self.group["eps"]) + decay * self.x[k]
        r = np.clip(np.linalg.norm(self.x[k]) / np.linalg.norm(u), 0.01, 10)
        self.c[k] = 0.9 * self.c[k] + 0.1 * r
        self.x[k] = self.x[k] - self.group["lr"] * r * u

    def compressed(self, k: int, own: Vectors) -> None:
        (beta1, beta2), decay, eps = self.group["betas"], self.group["weight_decay"], self.group["eps"]
        before, seen, s = self.m[k], self.v[k] > 0, self.s[k]
        m = self.squeeze[k].step(s * (beta1 * before + (1 - beta1) * own) * seen) / s * seen
        g = (m - beta1 * before) / (1 - beta1)
        self.z[k] = beta2 * self.z[k] + (1 - beta2) * g**2
        p = m / (np.sqrt(self.v[k]) + eps)
        u = p + decay * self.x[k]
        f = np.max((np.sqrt(self.v[k]) + eps)[seen] / (np.sqrt(self.z[k]) + eps)[seen])
        a = min(1.0, float(np.linalg.norm(p) / np.linalg.norm(u))) if decay else 1.0
        f = np.clip(f * a + 1 - a, 0.5, 4)
        self.f[k] = float(np.clip(f, 0.9 * self.f[k], 1.1 * self.f[k]))
        self.x[k] = self.x[k] - self.group["lr"] * self.c[k] * self.f[k] * u
        self.m[k] = m
