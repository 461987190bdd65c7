"""What MPI may still read or write after Python has lost interest in it."""

from __future__ import annotations

import ctypes

_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes, _keep.restype = (ctypes.py_object,), None


def keep_alive(*objects: object) -> None:
    """Never free these objects, not even when the interpreter ends.

    A message that did not get through stays with MPI, which may move its data as late as in MPI_Finalize: after the
    last of Python's modules, with all that they held, is gone.
    """
    for one in objects:
        _keep(one)
