"""Open MPI's all-reduce by an algorithm of choice, through the tools interface of MPI (MPI_T).

The module coll/tuned reads the number of the forced algorithm when a communicator is made, if the job was started with
``coll_tuned_use_dynamic_rules``; the number can be set in between. 0: its own decision.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from mpi4py import MPI

VARIABLE = b"coll_tuned_allreduce_algorithm"
SETTINGS = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"}


class ToolsError(RuntimeError):
    """The tools interface of this MPI does not do what is asked."""


class AllreduceAlgorithm:
    """The control variable.

    Raises
    ------
    ToolsError
        This MPI has no such variable.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_path_of_libmpi())
        got, index, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._handle = ctypes.c_void_p()
        self._call("MPI_T_init_thread", MPI.THREAD_SINGLE, ctypes.byref(got))
        self._call("MPI_T_cvar_get_index", VARIABLE, ctypes.byref(index))
        self._call("MPI_T_cvar_handle_alloc", index, None, ctypes.byref(self._handle), ctypes.byref(count))

    def dup(self, comm: MPI.Comm, number: int) -> MPI.Comm:
        """A duplicate of `comm` whose Allreduce is algorithm `number`; collective.

        Raises
        ------
        ToolsError
            The number is not taken.
        """
        self._set(number)
        try:
            return comm.Dup()
        finally:
            self._set(0)

    def _set(self, number: int) -> None:
        taken = ctypes.c_int(-1)
        self._call("MPI_T_cvar_write", self._handle, ctypes.byref(ctypes.c_int(number)))
        self._call("MPI_T_cvar_read", self._handle, ctypes.byref(taken))
        if taken.value != number:
            raise ToolsError(f"{VARIABLE.decode()} is {taken.value} after it was set to {number}")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise ToolsError(f"{name} fails with {status}: the tuned algorithms need Open MPI with coll/tuned")


def _path_of_libmpi() -> str:
    found = re.search(r"(/\S*/libmpi\.so\S*)", Path("/proc/self/maps").read_text())
    if found is None:
        raise ToolsError("no libmpi.so is loaded: the tuned algorithms need Open MPI")
    return found[1]
