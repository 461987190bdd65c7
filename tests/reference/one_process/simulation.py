"""Any method with all its ranks in one process."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from collectives import Ring
from collectives.schedules.plan import Topology
from mpicomp import SSDM, CascadingSSDM, Dense, EFSignSGD, MajorityVote, Marsit, RandomK, ScaleCom, TrueTopK
from tests.reference import vote_counts
from tests.reference.one_process import cascading, codec_methods, marsit, shared_indices
from tests.reference.one_process.allreduce import dense, rounded

Vectors = NDArray[Any]


class Simulation(Protocol):
    """All ranks of a run."""

    def step(self, vectors: Vectors, /) -> Vectors:
        """Take one step: row m is rank m's vector. Return the result that every rank gets."""

    def state(self, rank: int, /) -> dict[str, Vectors]:
        """Return the vectors that a rank keeps, by the names of `state_dict`."""


class DenseOneProcess:
    """The mean over a topology."""

    def __init__(self, topology: Topology, dtype: Any) -> None:
        self.topology, self.dtype = topology, dtype

    def step(self, vectors: Vectors) -> Vectors:
        """Take one step: row m is rank m's vector. Return what every rank gets."""
        return rounded(dense(self.topology, vectors, "mean"), self.dtype)

    def state(self, rank: int) -> dict[str, Vectors]:
        """Return nothing: the method keeps nothing."""
        return {}


def simulation(
    options: Any, topology: Topology | None, size: int, n: int, dtype: Any, lengths: tuple[int, ...], vector_id: int
) -> Simulation:
    """Return the simulation of a method.

    Parameters
    ----------
    options : Algorithm
    topology : Topology or None
        None: small vectors under "auto".
    size, n : int
        Ranks and elements.
    dtype : type or "bfloat16"
        Of the vectors; the results of "bfloat16" are float32.
    lengths : tuple of int
        Of the tensors; () is one tensor.
    vector_id : int
    """
    words = {"seed": getattr(options, "seed", 0), "vector_id": vector_id}
    where: Any = size, n, dtype, lengths
    match options:
        case Dense():
            return DenseOneProcess(topology or Ring(), dtype)
        case CascadingSSDM():
            return cascading.OneProcess(options, topology or Ring(), size, n, dtype, vector_id)
        case Marsit():
            return marsit.OneProcess(options, topology, *where, vector_id)
        case MajorityVote():
            return vote_counts.Majority(size, n, dtype, **words)
        case EFSignSGD():
            return vote_counts.EFSign(*where, bucket=options.bucket)
        case SSDM():
            return vote_counts.StochasticSigns(*where, momentum=options.momentum, scale=options.scale, **words)
        case ScaleCom() | RandomK() | TrueTopK():
            return shared_indices.OneProcess(options, topology or Ring(), *where, vector_id)
    return codec_methods.OneProcess(options, size, n, dtype, vector_id)
