"""mpicomp: gradient communication that says less, on plain MPI."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives import (
        CollectiveError,
        CollectiveMismatch,
        CollectiveTimeout,
        Communicator,
        NonFiniteGradient,
    )
    from mpicomp.abort import install_abort_hook
    from mpicomp.algorithms import (
        ALGORITHMS,
        SSDM,
        CascadingSSDM,
        Dense,
        EFSignSGD,
        MajorityVote,
        Marsit,
        algorithm,
    )

__version__ = "0.1.0"

# Loaded when first asked for: importing mpi4py.MPI initialises MPI, and `mpicomp doctor` must work where it cannot.
_HOMES = {
    "collectives": (
        "CollectiveError",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "Communicator",
        "NonFiniteGradient",
    ),
    "mpicomp.abort": ("install_abort_hook",),
    "mpicomp.algorithms": (
        "ALGORITHMS",
        "SSDM",
        "CascadingSSDM",
        "Dense",
        "EFSignSGD",
        "MajorityVote",
        "Marsit",
        "algorithm",
    ),
}

__all__ = [
    "ALGORITHMS",
    "SSDM",
    "CascadingSSDM",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Dense",
    "EFSignSGD",
    "MajorityVote",
    "Marsit",
    "NonFiniteGradient",
    "algorithm",
    "install_abort_hook",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
