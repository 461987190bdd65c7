"""Errors of collectives. Every message names the rank, the cause and the cure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from traceback import walk_tb
from typing import Any, NoReturn, Self, TypeVar

_Class = TypeVar("_Class")


class CollectiveError(RuntimeError):
    """Base of all errors a collective raises.

    Examples
    --------
    >>> import mpicomp
    >>> def compare(comm):
    ...     comm.broadcast_object("data", root=comm.rank)
    >>> try:
    ...     mpicomp.run_local(2, compare)
    ... except mpicomp.CollectiveError as error:
    ...     print(type(error).__name__)
    CollectiveMismatch
    """


class CollectiveTimeout(CollectiveError):
    """No message has moved for the communicator's timeout: a rank is stopped, dead, or never made this call.

    The communicator cannot be used afterwards.

    Examples
    --------
    >>> import time
    >>> import mpicomp
    >>> def evaluate_on_rank_1(comm):
    ...     if comm.rank == 1:
    ...         time.sleep(0.3)
    ...     comm.barrier()
    >>> try:
    ...     mpicomp.run_local(2, evaluate_on_rank_1, arrival_timeout=0.1)
    ... except mpicomp.CollectiveTimeout:
    ...     print("pass a longer arrival_timeout")
    pass a longer arrival_timeout
    """


class LauncherMismatch(CollectiveError):
    """A launcher started more processes than MPI has joined: each would train a model of its own.

    `Communicator` raises it. The message names the launcher and the cure. A program that is meant to run once per
    process passes ``alone=True``.

    Examples
    --------
    >>> import mpicomp
    >>> with mpicomp.Communicator(alone=True) as comm:
    ...     comm.size
    1
    """


class NotARank(CollectiveError):
    r"""A process that a rank started, such as a worker that loads data, is no rank and cannot use MPI.

    `Communicator` and `run_local` raise it. A program of its own that a rank starts passes ``alone=True``.

    Examples
    --------
    >>> import subprocess, sys
    >>> program = "import mpicomp; print(mpicomp.Communicator(alone=True).size)"
    >>> subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    '1\n'
    """


class CollectiveMismatch(CollectiveError):
    """The ranks do not make the same call; raised on every rank, with the ranks and their differences.

    Attributes
    ----------
    closes : bool
        The communicator cannot be used afterwards, as calls of a rank were in flight; the same on all ranks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def sum_different_lengths(comm):
    ...     try:
    ...         comm.allreduce(np.ones(3 + comm.rank))
    ...     except mpicomp.CollectiveMismatch as error:
    ...         return error.closes
    >>> mpicomp.run_local(2, sum_different_lengths)
    [False, False]
    """

    def __init__(self, message: str, closes: bool = False) -> None:
        super().__init__(message)
        self.closes = closes


class OutOfMemory(CollectiveMismatch, MemoryError):
    """The rank that raises it has no memory for its part in a call; the others raise CollectiveMismatch."""


class PeerFailure(CollectiveError):
    """MPI reported that a message could not be sent or received.

    The communicator cannot be used afterwards.

    Examples
    --------
    >>> from collectives import CollectiveTimeout, Communicator, PeerFailure
    >>> comm = Communicator()
    >>> try:
    ...     ranks = comm.allreduce(1)
    ... except (PeerFailure, CollectiveTimeout):
    ...     raise SystemExit("a rank is lost: start again from the last checkpoint") from None
    >>> ranks
    1
    >>> comm.close()
    """


class RanksLost(PeerFailure):
    """Ranks died during a call that the survivors do not repeat by themselves; raised on all of them.

    The communicator goes on with the survivors, see ``Communicator(on_failure="regroup")``.

    Attributes
    ----------
    members : tuple of int
        Rank that each survivor had when the communicator was made.

    Examples
    --------
    >>> import numpy as np
    >>> from collectives import Communicator, RanksLost
    >>> def broadcast_weights(comm, weights):
    ...     try:
    ...         return comm.broadcast(weights, root=comm.size - 1)
    ...     except RanksLost as error:
    ...         print("ranks of the start that are left:", error.members)
    ...         return comm.broadcast(weights, root=0)
    >>> with Communicator() as comm:
    ...     broadcast_weights(comm, np.ones(2))
    array([1., 1.])
    """

    def __init__(self, message: str, members: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.members = members


class DamagedMessage(CollectiveError):
    """A message has arrived with other bytes than were sent, see ``Communicator(checksums=...)``.

    The rank that received it has used none of its bytes; its text names both ranks. The other ranks raise the error in
    the same call, or in their next one. The communicator cannot be used afterwards.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> with mpicomp.Communicator(checksums=True) as comm:
    ...     try:
    ...         total = comm.allreduce(np.ones(3))
    ...     except mpicomp.DamagedMessage as error:
    ...         raise SystemExit(f"start again from the last checkpoint: {error}") from None
    """

    @classmethod
    def of(cls, here: str, sender: int, nbytes: int) -> Self:
        """Return the error of a message that a rank has received."""
        return cls(
            f"{here}: a message of {nbytes} bytes from rank {sender} has arrived damaged, and nothing was computed "
            "from it: start again from the last checkpoint; if it happens again, test memory, network adapters and "
            "cables of both hosts"
        )


class CommunicatorClosed(CollectiveError):
    """The communicator was closed, or an earlier error left messages in flight.

    Examples
    --------
    >>> import mpicomp
    >>> comm = mpicomp.Communicator()
    >>> comm.close()
    >>> comm.barrier()
    Traceback (most recent call last):
        ...
    collectives.errors.CommunicatorClosed: rank 0 of 1: ...
    """


class NonFiniteGradient(CollectiveError):
    """Some ranks contributed NaN or infinity, or finite numbers overflowed; raised on every rank.

    Attributes
    ----------
    ranks : tuple of int
        Ranks that contributed NaN or infinity; empty if finite numbers overflowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     marsit = mpicomp.Marsit().start(comm, 3, dtype="float64")
    ...     try:
    ...         marsit.aggregate(np.array([1.0, 2.0, np.nan if comm.rank == 1 else 3.0]))
    ...     except mpicomp.NonFiniteGradient as error:
    ...         return error.ranks
    >>> mpicomp.run_local(2, step)
    [(1,), (1,)]
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:  # pickle makes it of the message alone
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


def refuse_copies(here: Callable[[Any], str], cure: str) -> Callable[[type[_Class]], type[_Class]]:
    """Refuse copies and pickles of a class's objects, which would lose their places among the ranks' calls."""

    def refuse(one: object, protocol: object) -> NoReturn:
        raise TypeError(f"{here(one)}: {type(one).__name__}, which communicates, is not copied or pickled; {cure}")

    def mark(cls: type[_Class]) -> type[_Class]:
        setattr(cls, "__reduce_ex__", refuse)  # noqa: B010 - mypy lets nobody assign it; copy and pickle call it
        return cls

    return mark


def reword(error: Exception, text: str) -> Exception:
    """Return an error of the same type with another text, by which a rank refuses a call.

    Raises
    ------
    Exception
        The error, or its cause, is that of a signal handler, which has no part in the call that it interrupts. It is
        raised as it is, also where a function has taken it for an error of another library.
    """
    for one in (error, error.__cause__):
        if one is not None and is_of_handler(one):
            raise one
    kind = type(error)
    if kind.__module__.partition(".")[0] == "numpy":  # its types take other arguments, such as a shape
        kind = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    return kind(text)


def is_of_handler(error: BaseException) -> bool:
    """Return True if a signal handler has raised the error: a function with the frame that it interrupts as argument.

    Its type is no evidence, since objects of users and other libraries raise errors of any type.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for outer, inner in pairwise(frames):
        for one in inner.f_locals.values():
            if any(part is outer for part in (one if isinstance(one, tuple) else (one,))):
                return True
    return False
