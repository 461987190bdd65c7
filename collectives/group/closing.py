"""Closing of a communicator, which all ranks agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from collectives.consistency.descriptions import fingerprint
from collectives.consistency.missing_ranks import MissingRanks
from collectives.errors import PeerFailure
from collectives.execution.call import Call, Steps
from collectives.group.ending import CLOSED
from collectives.progress.polling import until
from collectives.states import State

if TYPE_CHECKING:
    from collectives.group.group import Group


def close(comm: Group) -> None:
    """Close a communicator; see `Communicator.close`."""
    calls, observer = comm.calls, comm.observer
    if not calls.is_open:
        return
    if calls.driver is not None:
        calls.driver.flush()
    for call in tuple(calls.ordered):
        call.wait()
    if comm.size > 1:
        closing = Call(comm, lambda: "close()")
        closing.wait_name = None  # only the caller's own calls are observed
        closing.remake = lambda: _agree_on_closing(comm, closing)
        comm.run(closing, closing.remake())
    is_over = calls.state is State.CLOSING
    if observer is not None and not is_over:
        try:
            with comm.exchange():
                observer.close(comm.mpi_comm, comm.timeout)
        except PeerFailure:
            if comm.recovery is None:
                raise
            comm.losses.revoke(comm.mpi_comm)  # ranks may wait for this one, to compare their clocks
    if is_over:
        for one in (*comm.parts, comm):
            one.calls.where_driven(one.ending.end_by_closing)
    else:
        end_closed(comm)
        if comm.recovery is not None:
            comm.losses.release()
        elif not comm.ending.keeps_requests:
            comm.mpi_comm.Free()
    if observer is not None:
        observer.write()
    dropped = calls.dropped
    if dropped is not None and not dropped.seen:
        raise RuntimeError(f"{comm.here}: {dropped.name()} was begun and never waited for: keep what begin returns")


def end_closed(comm: Group) -> None:
    """End the calls of a communicator that all ranks close, and free its memory and requests."""
    comm.ending.dismiss()
    if comm.recovery is None:
        for nodes in comm.levels.values():
            nodes.close()
    else:  # the ranks have agreed for all parts, and one may have died since
        for part in comm.parts:
            end_closed(part)
    if comm.calls.pairwise:  # they do not concern all ranks, and their requests stay with MPI
        comm.calls.where_driven(comm.ending.end_by_closing)
        return
    comm.calls.enter(State.CLOSED, CLOSED)
    if comm.workers is not None:
        comm.workers.close()
    comm.dense_buffers.clear()
    comm.users.free_all()
    comm.call_check.free()


def _agree_on_closing(comm: Group, call: Call) -> Steps:
    """Agree on closing, and receive all that the ranks have sent besides their calls: MPI would keep it."""
    call.arrival = 0
    if comm.verifies:
        yield from comm.call_check.steps(call, fingerprint("close()"))
    yield from _receive_messages(call, comm.missing)
    if comm.recovery is not None:  # it is closed together with its parts
        for part in comm.parts:
            yield from _receive_messages(call, part.missing)


def _receive_messages(call: Call, missing: MissingRanks) -> Steps:
    sent, received = missing.stop_sending()
    # Twice: a rank would wait for ever for as many messages as a damaged number has.
    counts, twos = np.zeros((missing.comm.size, 2), np.int64), np.full(missing.comm.size, 2, np.int32)
    leaving = np.repeat(sent, 2)
    request = missing.comm.Ialltoallv([leaving, twos, MPI.INT64_T], [counts, twos, MPI.INT64_T])
    problem = f"{call.group.here}: not all ranks close the communicator"
    call.describe, call.owners = lambda: problem, (*call.owners, request, leaving, counts)
    yield from until(request, call)
    while (received < counts.min(axis=1)).any():
        missing.receive_messages()
        yield False
