"""How operations become calls of a communicator, and these become works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from collectives import Communicator
from collectives.consistency.call_check import fingerprint
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group.messages import Messages
from mpicomp.torch.process_group.operation import Operation, require_dense
from mpicomp.torch.process_group.packed import Packed
from mpicomp.torch.process_group.work import Work

HEARD_S = 0.5  # how long a rank that rejects a call waits for the others to make it
_NO_TIME = timedelta(0)


class Calls:
    """The calls of one process group.

    Parameters
    ----------
    comm : Communicator
        Has a progress thread.
    messages : Messages
    """

    def __init__(self, comm: Communicator, messages: Messages) -> None:
        self._comm, self.messages = comm, messages
        self._coalesced: list[Work] | None = None
        self.begun = 0
        """Collectives."""

    def collective(self, name: str, operation: Callable[..., Operation], *operands: Any, opts: Any = None) -> Work:
        """Begin a collective; arguments that cannot be used raise here, and CollectiveMismatch on the other ranks."""
        comm = self._comm
        try:
            made = operation(comm, *operands)
        except (TypeError, ValueError) as error:
            self._reject(f"{name}, rejected: {error}")
            raise type(error)(f"{comm.here}, {name}: {error}") from error
        self.begun += 1
        text = made.text  # whoever keeps the work keeps this, and none of the memory
        call = Call(comm, lambda: text)
        return self._work(call, self._steps(call, made), made.result, opts)

    def _reject(self, text: str) -> None:
        """Have the other ranks hear why this one does not make their call."""
        call = Call(self._comm, lambda: text)
        call.mark_seen()
        told = Work([self._comm.begin(call, self._comm.check(call, fingerprint(text)))], [])
        told.ended_within(HEARD_S)  # the error may end this process, and with it the thread that tells

    def _steps(self, call: Call, made: Operation) -> Steps:
        comm, mark = self._comm, fingerprint(made.text)
        if made.agrees:
            yield from made.steps(comm, call, mark)
        else:
            yield from comm.check(call, mark)
            yield from made.steps(comm, call)
        for packed in made.received:
            packed.unpack()
        yield from comm.turn_of(call)  # calls end in one order on all ranks, and so do callbacks of their futures
        call.mark_seen()  # a work may be dropped

    def message(
        self, name: str, steps: Callable[..., Steps], tensors: Sequence[Tensor], peer: int | None, tag: int
    ) -> Work:
        """Begin a message to or from another rank."""
        comm, sends = self._comm, name == "send"
        try:
            require_dense(tensors)
            self.messages.require(peer, tag)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{comm.here}, {name}: {error}") from error
        packed = Packed(tensors, filled=sends)
        whom = "any rank" if peer is None else f"rank {peer}"
        call = Call(comm, lambda: f"{name} {'to' if sends else 'of'} {whom} with tag {tag}")
        call.apart = True
        return self._work(call, self._message_steps(call, steps(comm, call, packed, peer, tag), packed, sends), tensors)

    @staticmethod
    def _message_steps(call: Call, steps: Steps, packed: Packed, sends: bool) -> Steps:
        yield from steps
        if not sends:
            packed.unpack()
        call.mark_seen()

    def _work(self, call: Call, steps: Steps, result: Sequence[Tensor], opts: Any = None) -> Work:
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout > _NO_TIME:
            call.timeout = timeout.total_seconds()
        work = Work([self._comm.begin(call, steps)], result)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self) -> None:
        """Collect the works that follow."""
        self._coalesced = []

    def end_coalescing(self) -> Work:
        """All works since, as one."""
        works, self._coalesced = self._coalesced or [], None
        handles = [handle for work in works for handle in work.handles]
        return Work(handles, [tensor for work in works for tensor in work.result()])
