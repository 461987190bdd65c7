"""SparseLoCo with all ranks in one process, from the definition and in plain NumPy."""

from __future__ import annotations

import numpy as np

from tests.reference.one_process.base import Simulation, Vectors
from tests.reference.sparse import largest_in_levels


class OneProcess(Simulation):
    """All ranks' steps from the definition."""

    def compute_step(self, g: Vectors) -> Vectors:
        options, total = self.options, np.zeros(self.n, self.compute)
        for rank in range(self.size):
            p, v = self.compute(options.decay) * self.residuals[rank] + g[rank], np.zeros(self.n, self.compute)
            for start, length in zip(self.starts, self.lengths, strict=True):
                tensor = slice(start, start + length)
                v[tensor] = largest_in_levels(p[tensor], options.rate, options.chunk, options.bits)
            self.residuals[rank] = p - v
            scaled = v.astype(np.float32).astype(self.compute) * self.compute(options.alpha)
            total = total + scaled if rank else scaled
        return total / self.compute(self.size)

    def state(self, rank: int) -> dict[str, Vectors]:
        return {"residual": self.residuals[rank]}
