"""Errors of collectives. Every message names the rank, the cause and the cure."""

from __future__ import annotations


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
