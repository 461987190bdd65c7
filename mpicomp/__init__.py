"""mpicomp: compressed gradient communication on plain MPI."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

with suppress(ImportError):  # of a package of this name that is not ours, which `mpicomp doctor` reports
    import collectives  # before mpi4py.MPI is loaded by any module of ours

if TYPE_CHECKING:
    from collectives import (
        CollectiveError,
        CollectiveMismatch,
        CollectiveTimeout,
        Communicator,
        CommunicatorClosed,
        DamagedMessage,
        NonFiniteGradient,
        PeerFailure,
        RanksLost,
    )
    from collectives.process_end import install_abort_hook
    from collectives.threads.run_local import run_local
    from mpicomp.algorithms import (
        ALGORITHMS,
        ECQSGD,
        EF21,
        QSGD,
        SSDM,
        Auto,
        CascadingSSDM,
        Dense,
        DoubleSqueeze,
        EFSignSGD,
        LocalTopK,
        MajorityVote,
        Marsit,
        MemSGD,
        OneBitSGD,
        PerNode,
        PowerSGD,
        RandomK,
        Relay,
        ScaleCom,
        SparseLoCo,
        TernGrad,
        TopKSGD,
        TrueTopK,
        algorithm,
    )
    from mpicomp.checkpoint.state import load_state, save_state
    from mpicomp.feedback.redistribute import redistribute

__version__ = "0.1.0"

# Loaded at first use: importing mpi4py.MPI initialises MPI, and `mpicomp doctor` must work where MPI does not.
# All other names are in `collectives` or `mpicomp.algorithms`.
_HOMES = {
    "install_abort_hook": "collectives.process_end",
    "load_state": "mpicomp.checkpoint.state",
    "redistribute": "mpicomp.feedback.redistribute",
    "run_local": "collectives.threads.run_local",
    "save_state": "mpicomp.checkpoint.state",
}

__all__ = [
    "ALGORITHMS",
    "ECQSGD",
    "EF21",
    "QSGD",
    "SSDM",
    "Auto",
    "CascadingSSDM",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorClosed",
    "DamagedMessage",
    "Dense",
    "DoubleSqueeze",
    "EFSignSGD",
    "LocalTopK",
    "MajorityVote",
    "Marsit",
    "MemSGD",
    "NonFiniteGradient",
    "OneBitSGD",
    "PeerFailure",
    "PerNode",
    "PowerSGD",
    "RandomK",
    "RanksLost",
    "Relay",
    "ScaleCom",
    "SparseLoCo",
    "TernGrad",
    "TopKSGD",
    "TrueTopK",
    "algorithm",
    "install_abort_hook",
    "load_state",
    "redistribute",
    "run_local",
    "save_state",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise import_module("mpicomp.other_names").missing(__name__, name, __all__)
    import_module("mpicomp.name_clash").require_ours()
    others = "collectives" if name in collectives.__all__ else "mpicomp.algorithms"
    with import_module("collectives.errors").explaining_mpi():
        return getattr(import_module(_HOMES.get(name, others)), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
