"""Messages between two ranks: they take no part in the order of collectives, and no other rank waits for them.

A short message with bytes, dtype and shape precedes each message, also without `verify`. Only then does the receiver
post the other receive, with memory of that length: an MPI library may write a longer message beyond the memory.
Receives of one rank and tag are posted in their order, whichever of them is polled.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.annotations import Array, Kept, SupportsDLPack
from collectives.arrays.elements import COPIED
from collectives.arrays.vectors import Flat, flat, is_read_only
from collectives.communicator.inbox import Heading, Inbox, description, header_of, message, read_header
from collectives.errors import CollectiveMismatch, reword
from collectives.execution.call import Call, Steps
from collectives.execution.handle import Handle
from collectives.execution.staged import stage
from collectives.progress.polling import wait
from collectives.tags import BETWEEN_TWO_RANKS, LARGEST_OF_USERS

if TYPE_CHECKING:
    from collectives.group.group import Group


def send(comm: Group, x: SupportsDLPack, to: int, tag: int = 0) -> None:
    """Send an array, and wait until the receiver has taken it or MPI has copied it.

    Parameters
    ----------
    x, to, tag
        As in `isend`.

    Raises
    ------
    TypeError, ValueError, CollectiveTimeout, PeerFailure
        As of `isend` and of its handle.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def pass_on(comm):
    ...     if comm.rank == 0:
    ...         comm.send(np.array([1, 2]), to=1, tag=5)
    ...     else:
    ...         return comm.recv(np.empty(2, np.int64), source=0, tag=5)
    >>> mpicomp.run_local(2, pass_on)[1]
    array([1, 2])
    """
    vector, name = _validate(comm, "send", x, "to", to, tag)
    with comm.observe("send", to=to, tag=tag, bytes=vector.values.nbytes):
        comm.run(*_make_send(comm, name, vector, to, tag))


def isend(comm: Group, x: SupportsDLPack, to: int, tag: int = 0) -> Handle[None]:
    """Begin to send an array to another rank.

    Parameters
    ----------
    x : array
        NumPy or DLPack, contiguous, on the CPU, of any dtype of `broadcast`. Leave it alone until the handle's
        ``wait()`` returns: that is when the receiver has taken it, or MPI has copied it.
    to : int
        The receiver; this rank itself is allowed.
    tag : int from 0 to 300
        Receives of another tag do not take the message. Messages of one tag arrive in the order of their sends.

    Returns
    -------
    Handle
        Its ``wait()`` returns None, and raises the errors of `irecv` except CollectiveMismatch.

    Raises
    ------
    TypeError, ValueError
        An argument cannot be used, on this rank alone: the other one waits for a message that does not come.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def rotate(comm):
    ...     right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    ...     receiving = comm.irecv(np.empty(1), source=left)
    ...     comm.isend(np.full(1, comm.rank, np.float64), to=right).wait()
    ...     return receiving.wait().item()
    >>> mpicomp.run_local(3, rotate)
    [2.0, 0.0, 1.0]
    """
    vector, name = _validate(comm, "isend", x, "to", to, tag)
    return comm.begin(*_make_send(comm, name, vector, to, tag))


def recv(comm: Group, out: Kept, source: int, tag: int = 0) -> Kept:
    """Overwrite an array with the one that another rank sends; `send` has an example.

    Parameters
    ----------
    out, source, tag
        As in `irecv`.

    Returns
    -------
    array
        `out`.

    Raises
    ------
    TypeError, ValueError, CollectiveMismatch, CollectiveTimeout, PeerFailure
        As of `irecv` and of its handle.
    """
    vector, name = _validate(comm, "recv", out, "from", source, tag)
    with comm.observe("recv", source=source, tag=tag, bytes=vector.values.nbytes):
        comm.run(*_make_receive(comm, name, vector, out, source, tag))
    return out


def irecv(comm: Group, out: Kept, source: int, tag: int = 0) -> Handle[Kept]:
    """Begin to receive an array from another rank; `isend` has an example.

    Parameters
    ----------
    out : array
        Overwritten; of the dtype and shape of the array that was sent.
    source : int
        The sender.
    tag : int from 0 to 300
        The tag that the sender gives.

    Returns
    -------
    Handle
        Its ``wait()`` returns `out`.

    Raises
    ------
    TypeError, ValueError
        See `isend`.
    CollectiveMismatch
        By ``wait()``: the sender has sent an array of another dtype or shape. `out` is then undefined,
        the message is lost, and the communicator can be used further. The sender gets no error.
    CollectiveTimeout
        By ``wait()``: the other rank has not come within the `arrival_timeout`, or the message has not moved for
        the `timeout`. The communicator can be used no longer.
    PeerFailure
        By ``wait()``: MPI reports that the other rank has failed.
    """
    vector, name = _validate(comm, "irecv", out, "from", source, tag)
    return comm.begin(*_make_receive(comm, name, vector, out, source, tag))


def _make_send(comm: Group, name: str, vector: Flat, to: int, tag: int) -> tuple[Call, Steps]:
    call = _make_call(comm, name, lambda: f"{comm.here}: rank {to} does not receive; {name}")
    copied = None if vector.staging is None else vector.staging.fetch()
    if copied is not None:  # before the next message of this tag can begin
        waiting = f"{comm.here}: the device does not come to a copy; {name}"
        wait(copied, comm.arrival_timeout, lambda: waiting)
    return call, _send(comm, call, vector, to, BETWEEN_TWO_RANKS[2 * tag])


def _make_receive(comm: Group, name: str, vector: Flat, out: Array, source: int, tag: int) -> tuple[Call, Steps]:
    call = _make_call(comm, name, lambda: f"{comm.here}: nothing from rank {source}; {name}")
    call.result = out
    steps = _receive(comm, call, vector, source, BETWEEN_TWO_RANKS[2 * tag])
    return call, stage(call, steps, None, vector.staging)


def _validate(comm: Group, call: str, x: Array, preposition: str, peer: int, tag: int) -> tuple[Flat, str]:
    """Return the vector of an array, and the call in words."""
    try:
        vector = flat(x, COPIED, verb="send" if preposition == "to" else "receive")
        if _integer("to" if preposition == "to" else "source", peer) not in range(comm.size):
            raise ValueError(f"there is no rank {peer}: pass one from 0 to {comm.size - 1}")
        if _integer("tag", tag) not in range(LARGEST_OF_USERS + 1):
            raise ValueError(f"the tag must lie in 0 .. {LARGEST_OF_USERS}, not {tag}")
        if preposition == "from" and is_read_only(vector, x):
            raise ValueError("the array is read-only: pass one that can be written")
    except (TypeError, ValueError, MemoryError) as error:
        raise reword(error, f"{comm.here}, {call}: {error}") from None
    return vector, f"{call} of {description(vector)} {preposition} rank {peer} with tag {tag}"


def _integer(argument: str, value: Any) -> int:
    """Return an argument as an integer; raises TypeError with its name if it is another object."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{argument} is {value!r:.80}: pass an integer") from None


def _make_call(comm: Group, name: str, describe: Callable[[], str]) -> Call:
    call = Call(comm, lambda: name)
    call.is_pairwise, call.describe = True, describe
    call.arrival = 0  # the other rank may have yet to come, however long that takes it
    return call


def _send(comm: Group, call: Call, vector: Flat, to: int, tag: int) -> Steps:
    requests = [
        comm.mpi_comm.Isend(np.frombuffer(header_of(vector), np.uint8), to, tag),
        comm.mpi_comm.Isend(message(vector.values.view(np.uint8)), to, tag + 1),
    ]
    call.owners = (vector, *requests)
    for request in requests:
        yield from comm.await_request(call, request, call.describe)


def _receive(comm: Group, call: Call, vector: Flat, source: int, tag: int) -> Steps:
    inbox = comm.calls.inboxes.setdefault((source, tag), Inbox())
    receive = inbox.begin(comm.mpi_comm, vector, source, tag)
    try:
        call.owners = (vector, receive)
        if inbox.begins_with(receive):  # waits without the inbox, whose tests take longer
            yield from comm.await_request(call, receive.heading, call.describe)
            inbox.go_on()
        if receive.request is None:
            yield from comm.await_request(call, Heading(inbox, receive), call.describe)
    finally:
        inbox.drop(receive)
    call.arrival = None  # from now on both ranks are there
    assert receive.request is not None
    yield from comm.await_request(call, receive.request, call.describe)
    if receive.differs:
        theirs = read_header(receive.header)
        raise CollectiveMismatch(
            f"{comm.here}: {call.name()}, but rank {source} sends {theirs}: let both pass arrays of one dtype and shape"
        )
