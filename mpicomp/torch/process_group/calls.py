"""How operations become calls of a communicator, and these become works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from collectives import Communicator
from collectives.consistency.call_check import fingerprint
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group.messages import Comes, Messages
from mpicomp.torch.process_group.operation import Operation, require_dense
from mpicomp.torch.process_group.packed import Packed
from mpicomp.torch.process_group.twins import Twins
from mpicomp.torch.process_group.work import Work
from mpicomp.torch.profiling import begin_event

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

    def collective(
        self,
        name: str,
        operation: Callable[..., Operation],
        *operands: Any,
        opts: Any = None,
        source: int | None = None,
    ) -> Work:
        """Begin a collective; arguments that cannot be used raise here, and CollectiveMismatch on the other ranks.

        Where there is a `source`, a single operand is read on that rank alone, and written on the others.
        """
        comm, twins = self._comm, Twins()
        is_source = comm.rank == source
        try:
            on_host = _with_twins(twins, operands, (True, True) if source is None else (is_source, not is_source))
            made = operation(comm, *on_host)
        except (TypeError, ValueError, MemoryError) as error:
            self._reject(f"{name}, rejected: {error}")
            raise type(error)(f"{comm.here}, {name}: {error}") from error
        self.begun += 1
        text = made.text  # whoever keeps the work keeps this, and none of the memory
        call = Call(comm, lambda: text)
        result = twins.originals(made.result)
        steps = self._staged(call, twins, partial(operation, comm, *on_host)) if twins else self._steps(call, made)
        return self._work(name, call, self._ended(call, steps), result, opts)

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

    def _staged(self, call: Call, twins: Twins, make: Callable[[], Operation]) -> Steps:
        """The operation is made again once the twins hold what is to be sent, as some of it may be packed then."""
        yield from twins.fetch(call)
        made = make()
        yield from self._steps(call, made)
        if made.received:
            yield from twins.deliver(call)

    def _ended(self, call: Call, steps: Steps) -> Steps:
        yield from steps
        yield from self._comm.turn_of(call)  # calls end in one order on all ranks, as do callbacks of their futures
        call.mark_seen()  # a work may be dropped

    def message(
        self, name: str, steps: Callable[..., Steps], tensors: Sequence[Tensor], peer: int | None, tag: int
    ) -> Work:
        """Begin a message to or from another rank."""
        comm, sends, twins = self._comm, name == "send", Twins()
        try:
            on_host = twins.of(tensors, read=sends, written=not sends)
            require_dense(on_host)
            self.messages.require(peer, tag)
        except (TypeError, ValueError, MemoryError) as error:
            raise type(error)(f"{comm.here}, {name}: {error}") from error
        whom = "any rank" if peer is None else f"rank {peer}"
        call = Call(comm, lambda: f"{name} {'to' if sends else 'of'} {whom} with tag {tag}")
        call.is_pairwise = True
        packed = Packed(on_host, filled=sends and not twins)
        begun = partial(steps, comm, call, packed, peer, tag)
        if sends:
            moved = self._sent(call, begun, twins, packed, self.messages.turn(call, peer, tag))
        else:
            moved = self._received(call, begun, twins, packed)
        return self._work(name, call, moved, tensors)

    @staticmethod
    def _sent(
        call: Call, begin: Callable[[], Steps], twins: Twins, packed: Packed, turn: AbstractContextManager[Comes]
    ) -> Steps:
        with turn as comes:
            if twins:
                yield from twins.fetch(call)
                packed.fill()
            while not comes():
                yield False
            steps = begin()
            going_on = next(steps, None) is not None  # the next message may follow
        if going_on:
            yield from steps
        call.mark_seen()

    @staticmethod
    def _received(call: Call, begin: Callable[[], Steps], twins: Twins, packed: Packed) -> Steps:
        yield from begin()
        packed.unpack()
        yield from twins.deliver(call)
        call.mark_seen()

    def _work(self, name: str, call: Call, steps: Steps, result: Sequence[Tensor], opts: Any = None) -> Work:
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout > _NO_TIME:
            call.timeout = timeout.total_seconds()
        end_event = begin_event(name)
        work = Work([self._comm.begin(call, steps)], result)
        if end_event is not None:
            work.when_ended(end_event)
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


def _with_twins(twins: Twins, operands: Sequence[Any], single: tuple[bool, bool]) -> list[Any]:
    """A collective's operands: of two with tensors the first is written and the second read.

    `single` says whether one alone is read, and whether it is written.
    """
    second_too = len(operands) > 1 and isinstance(operands[1], Tensor | list | tuple)
    sides = [(False, True), (True, False)] if second_too else [single]
    taken = [twins.of(one, *side) for one, side in zip(operands, sides, strict=False)]
    return [*taken, *operands[len(taken) :]]
