"""1-bit Adam with all its ranks in one process, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Ring
from mpicomp import Dense, DoubleSqueeze
from tests.reference.one_process.simulation import simulation

Vectors = NDArray[Any]


class OneBitAdamOneProcess:
    """One bucket, all of whose elements have the options of one group.

    Parameters
    ----------
    x : float32[n] or float64[n]
        The model; moved in place.
    size : int
        Ranks.
    compressor : str
    bucket_index : int
    warmup_steps : int
    preconditioned : bool
    group : dict
        "lr", "betas", "eps", "weight_decay", "decoupled_weight_decay".

    Attributes
    ----------
    m, w : ndarray[n]
        First moment; 1 / (sqrt(v) + eps) of the frozen v, 0 where v was 0, and None before.
    """

    def __init__(
        self,
        x: Vectors,
        size: int,
        compressor: str,
        bucket_index: int,
        warmup_steps: int,
        preconditioned: bool,
        group: dict[str, Any],
    ) -> None:
        self.x, self.group, self.warmup_steps, self.preconditioned = x, group, warmup_steps, preconditioned
        self.m, self.v, self.t = np.zeros_like(x), np.zeros_like(x), 0
        self.w: Vectors | None = None
        where = Ring(), size, x.size, x.dtype.type, (), bucket_index
        self.dense, self.squeeze = simulation(Dense(), *where), simulation(DoubleSqueeze(compressor), *where)

    def step(self, gradients: Sequence[Vectors]) -> None:
        """Row m is rank m's gradient."""
        one, group, t = self.x.dtype.type, self.group, self.t + 1
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        g = np.array(gradients)
        if t > self.warmup_steps:
            self.exchange(g, one(beta1), t)
        else:
            g = self.dense.step(g)
            self.add_penalty(g)
            self.m = self.m + one(1 - beta1) * (g - self.m)
            self.v = one(beta2) * self.v + one(1 - beta2) * g * g
        if group["decoupled_weight_decay"]:
            self.x *= one(1 - lr * decay)
        length = one(lr / (1 - beta1**t))
        if self.w is None:
            self.x -= length * self.m / (np.sqrt(self.v) / one(np.sqrt(1 - beta2**t)) + one(group["eps"]))
        else:
            self.x -= length * (self.m if self.preconditioned else self.m * self.w)
        self.t = t

    def exchange(self, g: Vectors, beta1: Any, t: int) -> None:
        one = self.x.dtype.type
        if self.w is None:
            v = self.v / one(1 - self.group["betas"][1] ** (t - 1))
            self.w = np.where(self.v > 0, 1 / (np.sqrt(v) + one(self.group["eps"])), 0).astype(one)
            if self.preconditioned:
                self.m = self.m * self.w
        for row in g:
            self.add_penalty(row)
        own = g * self.w if self.preconditioned else np.where(self.w > 0, g, 0)
        self.m = self.squeeze.step(beta1 * self.m + (1 - beta1) * own) * (self.w > 0)

    def add_penalty(self, g: Vectors) -> None:
        if not self.group["decoupled_weight_decay"]:
            g += self.x.dtype.type(self.group["weight_decay"]) * self.x
