"""Executor that runs a program over MPI as a data flow of pieces; `stepwise` runs short vectors.

A piece is merged when its message and its local encoding are there, and forwarded at once. MPI makes no progress while
Python computes, so the loop alternates: test the oldest receive of each peer; if nothing has landed, do one piece of
work that is due anyway, most urgent first (encode, prepare a merge, decode), and test again. Receives are posted ahead,
in plan order, as far as there are buffers for them. The workers of the communicator, if it has any, do the work while
the loop tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

from mpi4py import MPI

from collectives.annotations import Testable
from collectives.errors import PeerFailure
from collectives.execution.call import Call, Steps
from collectives.execution.jobs import Jobs
from collectives.execution.payload import MergedPayload, MessageStarter, Payload, not_received, not_sent
from collectives.execution.program import Message, Program
from collectives.execution.requests import Cache, Requests
from collectives.execution.stepwise import StepwiseExecution
from collectives.execution.traffic import Traffic


def runs_stepwise(program: Program, payload: Payload) -> bool:
    """Return whether a program is run step by step. The messages are the same, so that ranks may differ in this."""
    few = len(program.pieces) <= program.plan.n_chunks and program.most_landing <= payload.receive_buffers
    return payload.brief and few


def execute(
    call: Call,
    program: Program,
    payload: Payload,
    tag: int,
    traffic: Traffic,
    encoded: Callable[[], None] | None = None,
    cache: Cache | None = None,
    overlapped: bool = False,
) -> Steps:
    """Run a program to its end, as part of a call.

    Parameters
    ----------
    call : Call
    program : Program
    payload : Payload
        A `MergedPayload` if the program merges.
    tag : int
        Tag of the messages; no other messages under way have it.
    traffic : Traffic
        Bytes, messages and seconds are added to it.
    encoded : callable, optional
        Called once, when this rank's own contribution is complete.
    cache : dict, optional
        Persistent requests, kept between runs of this program on the same buffers.
    overlapped : bool
        The program runs while other work of the call goes on.
    """
    kind = StepwiseExecution if not overlapped and runs_stepwise(program, payload) else PipelinedExecution
    requests: MessageStarter = Requests(call.group.mpi_comm, tag, cache)
    observer = call.group.observer
    if observer is not None:
        payload, requests = observer.around_run(call, program, payload, requests)
    execution = kind(program, payload, requests, traffic, encoded)
    call.owners = (*call.owners, execution)
    return execution.steps(call)


class PipelinedExecution:
    """One run of a program; the parameters are those of `execute`."""

    _jobs: Jobs  # set at the first step

    def __init__(
        self,
        program: Program,
        payload: Payload,
        requests: MessageStarter,
        traffic: Traffic,
        encoded: Callable[[], None] | None,
    ) -> None:
        self._program, self._payload, self._requests = program, payload, requests
        self._merged = cast(MergedPayload, self._payload)  # used if the program merges
        self._traffic, self._encoded = traffic, encoded
        self._call: Call | None = None  # the call that this run belongs to
        count = len(program.pieces)
        self._at = [0] * count  # position in the piece's chain; -1: not encoded yet
        for piece in program.encode_order:
            self._at[piece] = -1
        self._sends_left = [0] * count  # sends of the piece still in flight
        self._arrived: dict[int, int] = {}  # receive -> receive buffer
        self._to_encode = deque(program.encode_order)
        self._to_finish: deque[int] = deque()
        self._to_prepare: deque[tuple[Message, int]] = deque()
        self._unmerged: set[int] = set()  # receives posted whose merge has not begun
        self._unencoded, self._unfinished = len(program.encode_order), count
        self._preparing: set[int] = set()  # receives whose merges workers prepare
        self._ahead: set[int] = set()  # receives that are merged, but whose pieces have not gone on since
        self._taking = -1  # receive that `_take` is working on
        self._next_recv = 0
        self._free_buffers = [*range(payload.receive_buffers)]
        self._posted: dict[int, deque[tuple[Testable, Message, int]]] = {p: deque() for p in program.peers_in}
        self._queues: dict[int, deque[Message]] = {}
        for message in program.sends:
            self._queues.setdefault(message.peer, deque()).append(message)
        self._sending: deque[tuple[Testable, Message]] = deque()
        self._last: Message | None = None

    def steps(self, call: Call) -> Steps:
        """Run the program as part of a call, until all pieces are in the result and all sends are complete.

        Raises
        ------
        PeerFailure
        """
        self._call, call.describe = call, self._describe
        clock, turn = self._traffic.clock, self._turn
        start, waited_s = clock(), call.waited_s
        jobs = self._jobs = Jobs(None if self._payload.brief else call.group.workers, self._traffic)
        if not jobs.at_once:
            call.rest_meanwhile = self._rest
        try:
            while self._unfinished or self._sending:
                moved = turn()
                if not moved and call.stream is not None and not self._sending and jobs.are_queued(self._unfinished):
                    jobs.leave_queued(call)
                    break
                yield moved
        finally:
            call.rest_meanwhile = None
            jobs.end()
        call.moved()
        self._traffic.seconds_total += clock() - start
        self._traffic.seconds_waiting += max(0.0, call.waited_s - waited_s - jobs.rested_s)
        self._call = None

    def _turn(self) -> bool:
        """Do the most urgent thing; return False if there is nothing to do except to wait."""
        try:
            return self._poll() or self._work()
        except MPI.Exception as error:
            raise PeerFailure(f"{self._describe()}: MPI says {error}") from error

    def _work(self) -> bool:
        """Do the most urgent work, here or by a worker; return False if there is no work, or no worker is free."""
        payload, jobs = self._payload, self._jobs
        if jobs.all_busy:
            return False
        if self._to_encode:
            piece = self._to_encode.popleft()
            jobs.do("seconds_encoding", partial(self._after_encoding, piece), payload.encode, piece)
        elif self._to_prepare:
            message, buffer = self._to_prepare.popleft()
            if message.index in self._unmerged and message.index not in self._preparing:
                self._preparing.add(message.index)
                after = partial(self._after_preparing, message)
                jobs.do("seconds_merging", after, self._merged.prepare, message, buffer)
        elif self._to_finish:
            jobs.do("seconds_decoding", self._after_finishing, payload.finish, self._to_finish.popleft())
        else:
            return False
        return True

    def _after_encoding(self, piece: int) -> None:
        self._at[piece] = 0
        if self._program.last_recv[piece] < 0:
            self._to_finish.append(piece)
        self._advance(piece)
        self._unencoded -= 1
        if not self._unencoded and self._encoded is not None:
            self._encoded()

    def _after_preparing(self, message: Message) -> None:
        self._preparing.discard(message.index)
        if message.index in self._arrived:
            self._advance(message.piece)

    def _after_finishing(self) -> None:
        self._unfinished -= 1

    def _after_merging(self, message: Message, buffer: int) -> None:
        self._free_buffers.append(buffer)
        self._ahead.add(message.index)
        if message.index != self._taking:  # a worker or a device has merged it
            self._advance(message.piece)

    def _rest(self) -> bool:
        """Sleep while workers do the work, until messages must be tested again; return False if no worker has any."""
        return self._jobs.rest(messages=bool(self._sending or any(self._posted.values())))

    def _poll(self) -> bool:
        """Take arrived messages, drop completed sends, and post receives; return False if nothing has completed."""
        moved = self._jobs.collect()
        for queue in self._posted.values():
            if queue and queue[0][0].Test():
                assert self._call is not None
                self._call.moved()  # the work on the message does not count as waiting
                _, message, buffer = queue.popleft()
                self._arrived[message.index] = buffer
                self._last = message
                self._advance(message.piece)
                moved = True
        while self._sending and self._sending[0][0].Test():
            self._sends_left[self._sending.popleft()[1].piece] -= 1
            moved = True
        if self._next_recv < len(self._program.recvs):
            self._post()
        return moved

    def _post(self) -> None:
        """Post receives in plan order while there are buffers to receive into."""
        recvs = self._program.recvs
        while self._next_recv < len(recvs):
            message = recvs[self._next_recv]
            if message.held_weight:
                if not self._free_buffers:
                    return
                number = self._free_buffers.pop()
                memory = self._merged.incoming(message.piece, number, message.weight)
                self._to_prepare.append((message, number))
                self._unmerged.add(message.index)
            else:
                # a receive may overwrite the piece only once all its earlier messages are done
                piece, number = message.piece, -1
                at = self._at[piece]
                if at < 0 or self._program.chains[piece][at] is not message or not self._sent(piece):
                    return
                memory = self._payload.replacing(piece, message.weight)
            request = self._requests.receive((message.index, number), memory, message.peer)
            self._posted[message.peer].append((request, message, number))
            self._next_recv += 1

    def _sent(self, piece: int) -> bool:
        """Return whether no send of the piece is in flight. Sends may complete in another order than they began."""
        if self._sends_left[piece]:
            for entry in [entry for entry in self._sending if entry[1].piece == piece]:
                if entry[0].Test():
                    self._sending.remove(entry)
                    self._sends_left[piece] -= 1
        return not self._sends_left[piece]

    def _send(self, message: Message) -> None:
        buffer = self._payload.outgoing(message.piece, message.weight)
        request = self._requests.send(message.index, buffer, message.peer)
        self._sends_left[message.piece] += 1
        self._sending.append((request, message))
        self._traffic.bytes_sent += buffer[1]
        self._traffic.messages += 1

    def _advance(self, piece: int) -> None:
        """Move a piece, and pieces that waited for it, along their chains as far as possible."""
        work = [piece]
        while work:
            piece = work.pop()
            chain, at = self._program.chains[piece], self._at[piece]
            last = self._program.last_recv[piece]
            if at < 0:
                continue
            before = at
            while at < len(chain):
                message = chain[at]
                if message.is_send:
                    queue = self._queues[message.peer]
                    if queue[0] is not message:
                        break
                    queue.popleft()
                    self._send(message)
                    if queue:
                        work.append(queue[0].piece)
                elif not self._take(message):
                    break
                at += 1
            self._at[piece] = at
            if before <= last < at:
                self._to_finish.append(piece)

    def _take(self, message: Message) -> bool:
        """Take a message into its piece; return False if it has not arrived, or if a worker or a device merges it."""
        index = message.index
        if index in self._ahead:
            self._ahead.discard(index)
            return True
        if index in self._preparing:
            return False
        buffer = self._arrived.pop(index, None)
        if buffer is None or not message.held_weight:
            return buffer is not None
        self._unmerged.discard(index)
        self._taking = index
        after = partial(self._after_merging, message, buffer)
        self._jobs.do("seconds_merging", after, self._merged.merge, message, buffer)
        self._taking = -1
        merged = index in self._ahead
        self._ahead.discard(index)
        return merged

    def _describe(self) -> str:
        plan = self._program.plan
        here = f"rank {plan.rank} of {plan.size}"
        oldest = min((q[0][1] for q in self._posted.values() if q), key=lambda m: m.index, default=None)
        if oldest is None and self._next_recv < len(self._program.recvs) and not self._sending:
            oldest = self._program.recvs[self._next_recv]
        if oldest is not None:
            return not_received(here, oldest, self._last)
        return not_sent(here, self._sending[0][1]) if self._sending else here
