"""Engine that runs a row of the table as a call of the communicator, and returns a work for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from collectives import Communicator
from collectives.consistency.call_check import fingerprint
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group.collective import Collective, Operands, bind_operands, leaves
from mpicomp.torch.process_group.tensor_memory import StagingTensors
from mpicomp.torch.process_group.transfers import BoundCollective
from mpicomp.torch.process_group.work import NO_TIMEOUT, MPIWork
from mpicomp.torch.profiling import begin_event

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
            self._reject(f"{row.name}, rejected: {error}")
            raise type(error)(f"{comm.here}, {row.name}: {error}") from error
        self.begun += 1
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
        yield from self.comm.turn_of(call)
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
