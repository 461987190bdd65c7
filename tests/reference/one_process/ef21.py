"""EF21 with momentum with all its ranks in one process, from the equations and the codecs in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicomp.codecs import Draw
from tests.reference.compressors import decoded
from tests.reference.one_process.allreduce import dense
from tests.reference.one_process.base import Simulation, Vectors


class OneProcess(Simulation):
    """A run of it; row m of `momenta` and `estimates` is rank m's, `common` and `owners` belong to all ranks."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.momenta, self.estimates = (np.zeros((self.size, self.n), self.compute) for _ in range(2))
        self.common, self.owners = (np.zeros(self.n, self.compute) for _ in range(2))

    def compute_step(self, g: Vectors) -> Vectors:
        if not self.t:
            self.momenta, self.estimates, self.common = g.copy(), g.copy(), dense(self.topology, g, "mean")
            return self.common
        eta = self.compute(self.options.eta)
        self.momenta = g.copy() if eta == 1 else (g - self.momenta) * eta + self.momenta
        both_ways = self.options.both_ways
        changes = np.zeros(self.n, self.compute)
        for rank in range(self.size):
            change = self.encoded(self.momenta[rank] - self.estimates[rank], "worker" if both_ways else "", rank)
            self.estimates[rank] += change
            changes += change
        changes /= self.compute(self.size)
        if both_ways:
            compensated = changes + self.owners
            changes = self.encoded(compensated, "owner", 0)
            self.owners = compensated - changes
        self.common = self.common + changes
        return self.common

    def encoded(self, values: Vectors, who: str, rank: int) -> Vectors:
        """Return the values that ranks decode."""
        draw = Draw(self.stream(f"code of {who}" if who else "code"), self.t, rank)
        return decoded(self.options.compressor, values, draw)

    def state(self, rank: int) -> dict[str, Vectors]:
        found = {"estimate": self.estimates[rank], "momentum": self.momenta[rank], "common": self.common}
        return found | {"ranks": np.array([self.size])}

    def shares(self) -> dict[str, Vectors]:
        return {"owner_distance": self.owners} if self.options.both_ways else {}
