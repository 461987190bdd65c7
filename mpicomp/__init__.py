"""mpicomp: gradient communication that says less, on plain MPI."""

from collectives import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    Communicator,
    NonFiniteGradient,
)

from mpicomp.abort import install_abort_hook
from mpicomp.algorithms import ALGORITHMS, CascadingSSDM, Dense, Marsit, algorithm

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "CascadingSSDM",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Dense",
    "Marsit",
    "NonFiniteGradient",
    "algorithm",
    "install_abort_hook",
]
