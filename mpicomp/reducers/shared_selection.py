"""Signs of shared winners: the ranks draw alike who wins each element, and one all-gather brings the winners' signs.

Nothing is merged on the way. Pieces of all ranks' payloads go round a ring, each rank passing on what it gets; those of
a small vector travel with the ranks' reports.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.devices import Landed
from collectives.execution.partition import pieces
from collectives.execution.pipelined import execute
from collectives.execution.program import gather_program
from collectives.memory import aligned_empty
from collectives.progress.polling import done
from collectives.schedules.all_gather import AllGather
from collectives.testable import Testable
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import MessageModel
from mpicomp.codecs.shared_selection import Selection, SharedSelection
from mpicomp.reducers.side_channel import SideChannel
from mpicomp.reducers.sign_merge import BRIEF_ELEMENTS, SignFeedback

PIECE_BYTES = 128 << 10  # of one rank's payload


def selection_model(n: int, ranks: int, winners: int, piece_bytes: int) -> MessageModel:
    """See `Algorithm.message_model`: the same bytes whatever a message's weight."""
    codec = SharedSelection(ranks, winners)
    longest = 8 * ranks * min(piece_bytes, PIECE_BYTES) // codec.votes // codec.alignment * codec.alignment
    return MessageModel(codec.nbytes, max(codec.alignment, longest), codec.alignment, AllGather(), decoded_once=True)


class SelectionGather:
    """The signs of one or two winners of each element; see `OneBitReducer`.

    Parameters as in `SignMerge`, with a codec that is bound to the stream of the winners.

    Attributes
    ----------
    second : uint64[ceil(n / 64)] or None
        The second winners' signs, beside the first ones in `bits`.
    """

    def __init__(self, comm: Communicator, n: int, selection: Selection, reports: int) -> None:
        codec = selection.codec
        model = selection_model(n, comm.size, codec.votes, comm.packed_piece_bytes())
        self._comm, self._at_once = comm, comm.gathers(codec.nbytes(n))
        whole = (range(n),) if n else ()
        self.pieces = whole if self._at_once else pieces(range(n), model.piece_elements, codec.alignment)
        self.bits = aligned_empty(-(-n // 64), np.uint64)
        self.second = aligned_empty(self.bits.size, np.uint64) if codec.votes == 2 else None
        self.bits[:] = 0
        self.scratch: list[NDArray[np.uint64]] = [self.bits]
        self.side_channel = SideChannel(comm, reports, codec.nbytes(n) if self._at_once else 0)
        self._payload = SelectionPayload(selection, comm.rank, self.pieces, self.bits, self.second)
        if not self._at_once:
            self._tag, self._requests = comm.fixed_tag(), comm.persistent(self)
            self._program = gather_program(comm.rank, comm.size, self.pieces)

    def prepare(self, step: int) -> None:
        """See `OneBitReducer`: draw the winners of a short vector."""
        if self._payload.brief:
            self._payload.draw(step)

    def steps(self, call: VectorCall, feedback: SignFeedback) -> Iterator[bool]:
        """See `OneBitReducer`."""
        payload = self._payload
        payload.begin(call.step, feedback)
        try:
            if self._at_once:
                yield from self._with_reports(call, feedback)
            else:
                yield from execute(
                    call, self._program, payload, self._tag, call.traffic, feedback.encoded, self._requests
                )
        finally:
            payload.end()

    def _with_reports(self, call: VectorCall, feedback: SignFeedback) -> Iterator[bool]:
        payload, channel, traffic = self._payload, self.side_channel, call.traffic
        clock, size = traffic.clock, self._comm.size
        start = clock()
        if self.pieces:
            yield from done(call, payload.encode(self._comm.rank))
            channel.tail.view(np.uint64)[:] = payload.mine(0)
        feedback.encoded()
        sent = clock()
        yield from channel.collect(call, traffic)
        arrived = clock()
        if self.pieces:
            for origin in range(size):
                payload.words[0][origin][:] = channel.tails[origin].view(np.uint64)
                yield from done(call, payload.finish(origin))
        end = clock()
        traffic.seconds_encoding += sent - start
        traffic.seconds_waiting += arrived - sent
        traffic.seconds_decoding += end - arrived
        traffic.seconds_total += end - start


class SelectionPayload:
    """The payloads of all ranks; see `Payload`.

    Memory: W bits an element for payloads, and the winners, 0.71 bits an element at most.

    Attributes
    ----------
    words : list of uint64[ranks, words]
        Per piece, the payload of each rank.
    """

    receive_buffers = 0

    def __init__(
        self,
        selection: Selection,
        rank: int,
        cuts: tuple[range, ...],
        bits: NDArray[np.uint64],
        second: NDArray[np.uint64] | None,
    ) -> None:
        self._selection, self._rank, self._size, self._cuts = selection, rank, selection.codec.ranks, cuts
        self.brief = not cuts or cuts[-1].stop <= BRIEF_ELEMENTS
        self._winners = [selection.reserve(len(cut)) for cut in cuts]
        self.words = [aligned_empty(self._size * w.words, np.uint64).reshape(self._size, -1) for w in self._winners]
        votes = [bits] if second is None else [bits, second]
        self._votes = [[vote[cut.start // 64 : -(-cut.stop // 64)] for vote in votes] for cut in cuts]
        self._drawn = [-1] * len(cuts)  # the step whose winners a piece has
        self._missing, self._counting = [self._size] * len(cuts), threading.Lock()
        self._step = 0
        self._feedback: SignFeedback | None = None

    def begin(self, step: int, feedback: SignFeedback) -> None:
        """Go to another step's winners."""
        self._step, self._feedback = step, feedback
        self._missing = [self._size] * len(self._cuts)

    def end(self) -> None:
        """Let go of the feedback: a payload that kept it would keep it alive in a cycle."""
        self._feedback = None

    def draw(self, step: int) -> None:
        """Draw the winners of all pieces."""
        for k, cut in enumerate(self._cuts):
            if self._drawn[k] != step:
                self._selection.draw(self._winners[k], step, cut.start)
                self._drawn[k] = step

    def mine(self, k: int) -> NDArray[np.uint64]:
        """The payload that this rank sends of a piece."""
        payload: NDArray[np.uint64] = self.words[k][self._rank]
        return payload

    def encode(self, piece: int) -> Testable | None:
        """See `Payload`: take signs, and pick those that this rank wins."""
        assert self._feedback is not None
        k = piece % len(self._cuts)
        on_device = self._feedback.encode(k)
        if self._drawn[k] != self._step:
            self._selection.draw(self._winners[k], self._step, self._cuts[k].start)
            self._drawn[k] = self._step
        if on_device is not None:
            return Landed(on_device, partial(self._pick, k))
        self._pick(k)
        return None

    def _pick(self, k: int) -> None:
        self._selection.encode(self._votes[k][0], self._rank, self._winners[k], self.mine(k))

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        origin, k = divmod(piece, len(self._cuts))
        row = self.words[k][origin]
        return [row, row.nbytes, MPI.BYTE]

    replacing = outgoing

    def finish(self, piece: int) -> Testable | None:
        """See `Payload`: once the last rank's is there, put all signs in their places."""
        assert self._feedback is not None
        k = piece % len(self._cuts)
        with self._counting:
            self._missing[k] -= 1
            complete = not self._missing[k]
        if not complete:
            return None
        winners, words = self._winners[k], self.words[k]
        self._selection.decode(words.reshape(-1), words.shape[1], winners, self._votes[k])
        return self._feedback.finish(k)
