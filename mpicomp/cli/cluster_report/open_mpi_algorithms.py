"""Open MPI's all-reduce by an algorithm of choice, through the tools interface of MPI (MPI_T).

The module coll/tuned reads the number of the forced algorithm and its segment size when a communicator is made, if the
job was started with ``coll_tuned_use_dynamic_rules``; both can be set in between. 0: its own decision, and no segments.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from mpi4py import MPI

VARIABLE = b"coll_tuned_allreduce_algorithm"
SEGMENT = VARIABLE + b"_segmentsize"
SETTINGS = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"}


class ToolsError(RuntimeError):
    """The tools interface of this MPI does not support a request."""


class AllreduceAlgorithm:
    """Control variables of the algorithm. Raises ToolsError if this MPI has none, or does not accept a number."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_path_of_libmpi())
        # Open MPI takes a lower level for that of all of MPI, from then on
        self._call("MPI_T_init_thread", MPI.Query_thread(), ctypes.byref(ctypes.c_int()))
        self._handles = {name: self._handle(name) for name in (VARIABLE, SEGMENT)}

    def dup(self, comm: MPI.Comm, number: int, segment_bytes: int = 0) -> MPI.Comm:
        """Return a duplicate of `comm` whose Allreduce is algorithm `number` with such segments; collective."""
        self._set(number, segment_bytes)
        try:
            # between nodes Open MPI prefers its module coll/han, which would ignore the number
            return comm.Dup(MPI.Info.Create({"ompi_comm_coll_preference": "tuned,^han"}))
        finally:
            self._set(0, 0)

    def _handle(self, name: bytes) -> ctypes.c_void_p:
        index, handle = ctypes.c_int(), ctypes.c_void_p()
        self._call("MPI_T_cvar_get_index", name, ctypes.byref(index))
        self._call("MPI_T_cvar_handle_alloc", index, None, ctypes.byref(handle), ctypes.byref(ctypes.c_int()))
        return handle

    def _set(self, *values: int) -> None:
        for (name, handle), value in zip(self._handles.items(), values, strict=True):
            taken = ctypes.c_int(-1)
            self._call("MPI_T_cvar_write", handle, ctypes.byref(ctypes.c_int(value)))
            self._call("MPI_T_cvar_read", handle, ctypes.byref(taken))
            if taken.value != value:
                raise ToolsError(f"{name.decode()} is {taken.value} after it was set to {value}")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise ToolsError(f"{name} fails with {status}: the tuned algorithms need Open MPI with coll/tuned")


def _path_of_libmpi() -> str:
    found = re.search(r"(/\S*/libmpi\.so\S*)", Path("/proc/self/maps").read_text())
    if found is None:
        raise ToolsError("no libmpi.so is loaded: the tuned algorithms need Open MPI")
    return found[1]
