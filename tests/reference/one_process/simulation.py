"""Any method with all its ranks in one process."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
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
    Relay,
    ScaleCom,
    SparseLoCo,
    TrueTopK,
)
from tests.reference import vote_counts
from tests.reference.one_process import (
    cascading,
    codec_methods,
    low_rank,
    marsit,
    relay,
    shared_indices,
    sparse_loco,
)
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
    Relay: relay.OneProcess,
    ScaleCom: shared_indices.OneProcess,
    RandomK: shared_indices.OneProcess,
    TrueTopK: shared_indices.OneProcess,
    SparseLoCo: sparse_loco.OneProcess,
}


def simulation(options: Any, topology: Topology | None, *where: Any) -> Simulation:
    """Return the simulation of a method, found in the file with its module's name; parameters as in `Simulation`."""
    kind = type(options)
    file = f"{__package__}.{kind.__module__.rpartition('.')[2]}"
    if kind not in MADE and find_spec(file) is not None:
        MADE[kind] = import_module(file).OneProcess
    return MADE.get(kind, codec_methods.OneProcess)(options, topology, *where)
