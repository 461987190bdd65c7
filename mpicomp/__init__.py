"""Average gradients over plain MPI in one or two bits per element instead of 32.

A method such as `Marsit` is a dataclass of options; `start` makes an aggregator of it, and all ranks call `aggregate`.
`mpicomp.torch` has the optimizer and the hooks for PyTorch, `mpicomp.pipeline` pipeline stages.
`Communicator()` joins the ranks that ``mpicomp run -n 4 program.py`` started; `run_local` runs ranks as threads.
`help(mpicomp.Marsit)` describes one name, and `dir(mpicomp)` lists all.
`mpicomp.help_page()` lists the pages of the manual; ``mpicomp help quickstart`` prints one.

Examples
--------
>>> import numpy as np
>>> import mpicomp
>>> def average(comm):
...     aggregator = mpicomp.Marsit().start(comm, 3)
...     return aggregator.aggregate(np.full(3, comm.rank + 1.0, np.float32)).tolist()
>>> mpicomp.run_local(2, average)[0]
[1.5, 1.5, 1.5]
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from mpicomp.name_clash import require_ours

with suppress(ImportError):  # of a package of this name that is not ours
    import collectives  # before mpi4py.MPI is loaded by any module of ours
if sys.argv[1:2] != ["doctor"]:  # which reports the other package itself
    require_ours()

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
    from collectives.abort_hook import install_abort_hook
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
    from mpicomp.manual import help_page
    from mpicomp.state.redistribute import redistribute
    from mpicomp.state.state_file import load_state, save_state

__version__ = "0.1.0"

_MOST_FRAMES = 4  # between dir() and pydoc, which calls inspect.getmembers

# Loaded at first use: importing mpi4py.MPI initialises MPI, and `mpicomp doctor` must work where MPI does not.
# All other names are in `collectives` or `mpicomp.algorithms`.
_HOMES = {
    "help_page": "mpicomp.manual",
    "install_abort_hook": "collectives.abort_hook",
    "load_state": "mpicomp.state.state_file",
    "redistribute": "mpicomp.state.redistribute",
    "run_local": "collectives.threads.run_local",
    "save_state": "mpicomp.state.state_file",
}

__all__ = [
    "ALGORITHMS", "ECQSGD", "EF21", "QSGD", "SSDM", "Auto", "CascadingSSDM", "CollectiveError", "CollectiveMismatch",
    "CollectiveTimeout", "Communicator", "CommunicatorClosed", "DamagedMessage", "Dense", "DoubleSqueeze", "EFSignSGD",
    "LocalTopK", "MajorityVote", "Marsit", "MemSGD", "NonFiniteGradient", "OneBitSGD", "PeerFailure", "PerNode",
    "PowerSGD", "RandomK", "RanksLost", "Relay", "ScaleCom", "SparseLoCo", "TernGrad", "TopKSGD", "TrueTopK",
    "algorithm", "help_page", "install_abort_hook", "load_state", "redistribute", "run_local", "save_state",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise import_module("mpicomp.other_names").missing(__name__, name, __all__)
    others = "collectives" if name in collectives.__all__ else "mpicomp.algorithms"
    with import_module("collectives.missing_mpi").explaining_mpi():
        return getattr(import_module(_HOMES.get(name, others)), name)


def __dir__() -> list[str]:
    # help(mpicomp) would print thousands of lines, every docstring of the classes below: it shows the one above.
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("pydoc", "docmodule"):
            return ["__version__"]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return sorted([*__all__, "__version__"])
