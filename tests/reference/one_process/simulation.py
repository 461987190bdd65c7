"""Any method with all its ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.schedules.plan import Topology
from mpicomp import (
    SSDM,
    CascadingSSDM,
    Dense,
    EFSignSGD,
    MajorityVote,
    Marsit,
    PowerSGD,
    RandomK,
    ScaleCom,
    SparseLoCo,
    TrueTopK,
)
from tests.reference import vote_counts
from tests.reference.one_process import cascading, codec_methods, low_rank, marsit, shared_indices, sparse_loco
from tests.reference.one_process.allreduce import dense, rounded
from tests.reference.one_process.base import Simulation, Vectors


class DenseOneProcess(Simulation):
    """The mean over a topology; or of rounded vectors in rank order, whatever the topology, rounded once more."""

    def compute_step(self, g: Vectors) -> Vectors:
        if self.options.wire is None:
            return dense(self.topology, g, "mean")
        total = self.sent(g[0])
        for vector in g[1:]:
            total += self.sent(vector)
        return self.sent(total / self.compute(self.size))

    def sent(self, vector: Vectors) -> Vectors:
        return rounded(vector.astype(np.float32), self.options.wire).astype(self.compute)


MADE: dict[type, type[Simulation]] = {
    Dense: DenseOneProcess,
    CascadingSSDM: cascading.OneProcess,
    Marsit: marsit.OneProcess,
    MajorityVote: vote_counts.Majority,
    EFSignSGD: vote_counts.EFSign,
    SSDM: vote_counts.StochasticSigns,
    PowerSGD: low_rank.OneProcess,
    ScaleCom: shared_indices.OneProcess,
    RandomK: shared_indices.OneProcess,
    TrueTopK: shared_indices.OneProcess,
    SparseLoCo: sparse_loco.OneProcess,
}


def simulation(options: Any, topology: Topology | None, *where: Any) -> Simulation:
    """Return the simulation of a method; parameters as in `Simulation`."""
    return MADE.get(type(options), codec_methods.OneProcess)(options, topology, *where)
