"""Constants and types of MPI for a process whose ranks are threads, where no MPI library can be loaded.

`run_local` needs no messages of MPI, but modules of ours read constants and classes of ``mpi4py.MPI``. Here are those
that ranks of threads use. Nothing installs them unasked: a program of one rank each would go unnoticed.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import mpi4py


class _Status:
    source = -1

    def __init__(self) -> None:
        self._nbytes = 0

    def Set_elements(self, datatype: object, count: int) -> None:  # noqa: N802 - named as in mpi4py
        self._nbytes = count

    def Get_count(self, datatype: object) -> int:  # noqa: N802
        return self._nbytes


class _MPIException(RuntimeError):
    def Get_error_class(self) -> int:  # noqa: N802
        return int(self.args[0])


class _Comm:
    @staticmethod
    def Get_parent() -> None:  # noqa: N802
        return None


def _datatype(nbytes: int) -> SimpleNamespace:
    return SimpleNamespace(Get_size=lambda: nbytes)


def stand_in_for_mpi() -> None:
    """Let imports of ``mpi4py.MPI`` find the constants and types here, and one rank in ``COMM_WORLD``."""
    module: Any = ModuleType("mpi4py.MPI", __doc__)
    vars(module).update(
        Comm=_Comm, Intracomm=_Comm, Status=_Status, Exception=_MPIException, Request=object, Prequest=object,
        Op=object, Datatype=object, Group=object, Errhandler=object, buffer=memoryview,
        BYTE=_datatype(1), INT64_T=_datatype(8), SUM="sum", MAX="max", MIN="min",
        COMM_NULL=None, IN_PLACE=object(), ANY_SOURCE=-2, UNDEFINED=-32766, ERR_TRUNCATE=15, ERRORS_RETURN=None,
        COMM_TYPE_SHARED=0, THREAD_MULTIPLE=3, TAG_UB=0,
        Is_initialized=lambda: True, Is_finalized=lambda: False, Query_thread=lambda: 3,
    )  # fmt: skip
    # only after importing it has failed: otherwise two modules of this name would be in use
    sys.modules["mpi4py.MPI"] = module
    cast(Any, mpi4py).MPI = module
    from collectives.threads.thread_comm import LocalComm, World  # which imports the constants

    module.COMM_WORLD = module.COMM_SELF = LocalComm(World(1), 0)
