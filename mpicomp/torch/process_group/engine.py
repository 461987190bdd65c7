"""Engine that makes calls of the communicator of rows of the table, and of messages, and returns works for them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
from mpi4py import MPI
from torch import Tensor

from collectives import CollectiveMismatch, Communicator
from collectives.communicator.inbox import message
from collectives.consistency.descriptions import fingerprint
from collectives.errors import reword
from collectives.execution.call import Call, Steps
from mpicomp.torch.devices import begin_event
from mpicomp.torch.process_group.collective import Collective, Operands, bind_operands, leaves, require, require_rank
from mpicomp.torch.process_group.tensor_memory import Operand, PackedTensors, StagingTensors, as_bytes
from mpicomp.torch.process_group.transfers import BoundCollective
from mpicomp.torch.process_group.usable_tensors import require_dense, require_usable
from mpicomp.torch.process_group.work import NO_TIMEOUT, MPIWork

_ASYNC_SAVE = ", by async_save in the background: pass it process_group=torch.distributed.new_group(), one at a time"
REJECTION_SECONDS = 0.5  # a rank that rejects a call waits so long for the others to make it


class Engine:
    """Calls of one process group; its communicator has a progress thread."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.begun = 0  # number of collectives
        self._coalesced: list[MPIWork] | None = None

    def run_collective(self, row: Collective, operands: Operands, timeout: timedelta | None = None) -> MPIWork:
        """Begin a collective. Unusable arguments raise here, and CollectiveMismatch on the other ranks."""
        comm, staging = self.comm, StagingTensors()
        try:
            bound = bind_operands(row, comm, operands, staging)
        except (TypeError, ValueError, MemoryError) as error:
            reworded = reword(error, f"{comm.here}, {row.name}: {error}")
            self._reject(f"{row.name}, rejected: {error}")
            raise reworded from error
        self.begun += 1
        if threading.current_thread().name.startswith("AsyncCheckpointExecutor"):
            bound = bound._replace(text=bound.text + _ASYNC_SAVE)  # lest it meets an equal call of the program
        text = bound.text  # the caller's work keeps the text, but not the memory of `bound`
        call = Call(comm, lambda: text)
        steps = self._steps(call, row, bound, staging)
        return self.start_call(row.name, call, steps, [*leaves(operands.outputs)], timeout)

    def _reject(self, text: str) -> None:
        """Send the other ranks the reason for which this rank does not make their call."""
        call = Call(self.comm, lambda: text)
        call.mark_seen()
        work = MPIWork([self.comm.begin(call, self.comm.check(call, fingerprint(text)))], [])
        # The error may end this process, and with it the thread that sends the reason.
        work.ended_within(REJECTION_SECONDS)

    def _steps(self, call: Call, row: Collective, bound: BoundCollective, staging: StagingTensors) -> Steps:
        yield from staging.copy_to_host(call)
        if bound.sent and staging:
            bound.sent.copy_in()
        if not row.compares:
            yield from self.comm.check(call, fingerprint(bound.text))
        yield from row.move(self.comm, call, bound)
        if bound.received:
            bound.received.copy_out()
        yield from staging.copy_to_device(call)
        # Calls end in one order on all ranks, and so do the callbacks of their futures.
        yield from call.turn()
        call.mark_seen()  # a work may be dropped

    def start_call(
        self, name: str, call: Call, steps: Steps, tensors: Sequence[Tensor], timeout: timedelta | None = None
    ) -> MPIWork:
        """Begin a call, which profilers show by its name, and return its work."""
        if timeout is not None and timeout > NO_TIMEOUT:
            call.timeout = timeout.total_seconds()
        end_event = begin_event(name)
        work = MPIWork([self.comm.begin(call, steps)], tensors)
        if end_event is not None:
            work.when_ended(end_event)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self) -> None:
        """Collect the works that follow."""
        self._coalesced = []

    def end_coalescing(self) -> MPIWork:
        """Return one work for all that were collected."""
        works, self._coalesced = self._coalesced or [], None
        handles = [handle for work in works for handle in work.handles]
        return MPIWork(handles, [tensor for work in works for tensor in work.result()])


class Messages:
    """Messages between two ranks. They take no part in the order of collectives, nor in the agreement on them.

    A receive looks at the length of its message before it takes the message, since MPI writes past the end of a buffer
    that is too short. So receives must not overtake each other here: MPI keeps the order of messages, and the earlier
    receive takes the earlier one. `mpi_comm` is used for these messages alone.
    """

    def __init__(self, engine: Engine, mpi_comm: MPI.Comm) -> None:
        self._engine, self._comm = engine, mpi_comm
        mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._largest_tag = int(mpi_comm.Get_attr(MPI.TAG_UB) or 0)
        # Receives that have no message yet, with their source, by tag; sends yet to begin, by rank and tag
        self._receives: dict[int, list[tuple[Call, int | None]]] = defaultdict(list)
        self._sends: dict[tuple[int, int], list[Call]] = defaultdict(list)

    def start_message(self, name: str, operand: Operand, peer: int | None, tag: int) -> MPIWork:
        """Begin to "send" tensors to a rank, or to "receive" them from a rank; None: from any rank.

        A receive raises CollectiveMismatch if the message has another length, and the sender does not learn of it. The
        result of a receive is the source.
        """
        comm, sends, staging = self._engine.comm, name == "send", StagingTensors()
        try:
            tensors = [*leaves([operand])]
            require_usable([] if sends else tensors, tensors if sends else [])
            on_host = [*leaves(staging.stage(tensors, read=sends, written=not sends))]
            require_dense(on_host)
            if peer is not None:
                require_rank(peer, comm.size)
            most = self._largest_tag
            require(0 <= tag <= most, f"the tag {tag} does not lie in 0 .. {most}, which MPI allows")
        except (TypeError, ValueError, MemoryError) as error:
            raise reword(error, f"{comm.here}, {name}: {error}") from error
        whom = "any rank" if peer is None else f"rank {peer}"
        call = Call(comm, lambda: f"{name} {'to' if sends else 'of'} {whom} with tag {tag}")
        call.is_pairwise = True
        packed = PackedTensors(on_host)
        if sends and not staging:
            packed.copy_in()
        steps = (self._send if sends else self._receive)(call, packed, staging, peer, tag)
        return self._engine.start_call(name, call, steps, tensors)

    def _send(self, call: Call, packed: PackedTensors, staging: StagingTensors, to: int | None, tag: int) -> Steps:
        assert to is not None
        comm, waiting = self._engine.comm, self._sends[to, tag]
        waiting.append(call)
        try:
            if staging:
                yield from staging.copy_to_host(call)
                packed.copy_in()
            while waiting[0] is not call:
                yield False
            request = self._comm.Isend(message(as_bytes(packed.flat)), to, tag)
        finally:
            waiting.remove(call)
            if not waiting:
                del self._sends[to, tag]
        missing = f"{comm.here}: rank {to} does not receive the message of {call.name()}"
        yield from comm.await_request(call, request, lambda: missing)
        call.mark_seen()

    def _receive(
        self, call: Call, packed: PackedTensors, staging: StagingTensors, source: int | None, tag: int
    ) -> Steps:
        comm, status = self._engine.comm, MPI.Status()
        whom = "any rank" if source is None else f"rank {source}"
        call.describe = lambda: f"{comm.here}: nothing from {whom} for {call.name()}"
        waiting, own = self._receives[tag], (call, source)
        waiting.append(own)
        try:
            arrived = None
            while arrived is None:
                if self._may_look(own, waiting):
                    arrived = self._comm.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
                if arrived is None:
                    yield False
        finally:
            waiting.remove(own)
            if not waiting:  # a program may use each tag once
                del self._receives[tag]
        call.moved()
        call.result, nbytes = status.source, status.Get_elements(MPI.BYTE)
        fits = nbytes == packed.nbytes
        landing = as_bytes(packed.flat) if fits else np.empty(nbytes, np.uint8)
        request = arrived.Irecv(message(landing))
        call.owners = (*call.owners, landing)
        yield from comm.await_request(call, request, lambda: f"{comm.here}: the message for {call.name()} does not end")
        if not fits:
            raise CollectiveMismatch(
                f"{comm.here}: {call.name()} takes {packed.nbytes} bytes, and rank {call.result} sends {nbytes}: "
                "send and receive tensors of one size"
            )
        packed.copy_out()
        yield from staging.copy_to_device(call)
        call.mark_seen()

    @staticmethod
    def _may_look(own: tuple[Call, int | None], waiting: Sequence[tuple[Call, int | None]]) -> bool:
        """Return True if no earlier receive of this tag could take the same message."""
        for other in waiting:
            if other is own:
                return True
            if own[1] is None or other[1] in (None, own[1]):
                return False
        return True
