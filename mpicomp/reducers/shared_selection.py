"""Signs of shared winners: all ranks draw the same winner of each element, and an all-gather sends the winners' signs.

Messages are not merged on the way: pieces of all ranks' payloads go round a ring unchanged. Payloads of a small vector
travel with the ranks' reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Testable, Words, override
from collectives.arrays.elements import aligned_empty
from collectives.execution.payload import MessageMemory, Payload
from collectives.execution.pipelined import execute
from collectives.execution.program import gather_program, pieces
from collectives.schedules.broadcast import AllGather
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import MessageModel, Round
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.codecs.shared_selection import Selection, SharedSelection
from mpicomp.feedback.rounds import Work
from mpicomp.reducers.all_gather import gather_at_once
from mpicomp.reducers.sign_merge import BRIEF_ELEMENTS, OneBitReducer
from mpicomp.spaces import HOST, DeviceSpace, Space

PIECE_BYTES = 128 << 10  # longest message of one rank's payload


def selection_model(n: int, ranks: int, winners: int, piece_bytes: int) -> MessageModel:
    """Return the message model of a method; message sizes do not depend on the weight."""
    codec = SharedSelection(ranks, winners)
    longest = 8 * ranks * min(piece_bytes, PIECE_BYTES) // codec.votes // codec.alignment * codec.alignment
    return MessageModel(codec.nbytes, max(codec.alignment, longest), codec.alignment, AllGather(), decoded_once=True)


class SelectionPayload(Payload):
    """Payloads of all ranks, with the signs of the elements that each rank wins.

    Memory: W bits per element for payloads, and at most 0.71 bits per element for the winners. A device draws the
    winners, and picks and places signs; only payloads cross to the host.

    Parameters
    ----------
    space : Space
    selection : Selection
        Codec, bound to the space's kernels.
    rank : int
    cuts : tuple of range

    Attributes
    ----------
    words : list of uint64[ranks, words]
        Payload of each rank by pieces, in the host's memory.
    bits : uint64[ceil(n / 64)]
        This rank's signs, then the first winners'; an int64 tensor on a device.
    second : like bits, or None
        Signs of the second winners, if there are any.
    """

    receive_buffers = 0
    _encode_signs: Work
    _decode_signs: Work

    def __init__(self, space: Space, selection: Selection, rank: int, cuts: tuple[range, ...]) -> None:
        codec, self._is_host = selection.codec, space.is_host
        self._draw_winners, self._pick = space.bound(selection.draw), space.bound(selection.encode)
        self._place = space.bound(selection.decode)
        self._rank, self._size, self._cuts = rank, codec.ranks, cuts
        self.brief = not cuts or cuts[-1].stop <= BRIEF_ELEMENTS
        where = space.device if isinstance(space, DeviceSpace) else None
        self._winners = [selection.reserve(len(cut), where) for cut in cuts]
        self.words = [aligned_empty(self._size * w.words, np.uint64).reshape(self._size, -1) for w in self._winners]
        size = -(-cuts[-1].stop // 64) if cuts else 0
        self.bits = space.zeros(size, space.word)
        self.second = space.zeros(size, space.word) if codec.votes == 2 else None
        votes = [vote for vote in (self.bits, self.second) if vote is not None]
        self._votes = [[vote[cut.start // 64 : -(-cut.stop // 64)] for vote in votes] for cut in cuts]
        self._packed = space.packed([words.reshape(-1) for words in self.words])
        self._drawn = [-1] * len(cuts)  # step whose winners a piece has
        self._missing, self._counting = [self._size] * len(cuts), threading.Lock()
        self._step = 0

    def begin(self, step: int, work: Round) -> None:
        """Start another step, with its winners."""
        self._step, self._encode_signs, self._decode_signs = step, work.encode, work.decode
        self._missing = [self._size] * len(self._cuts)

    def end(self) -> None:
        """Drop the references to the feedback, which would keep it alive in a cycle."""
        del self._encode_signs, self._decode_signs

    def draw(self, step: int) -> None:
        """Draw the winners of all pieces."""
        for k in range(len(self._cuts)):
            self._draw(k, step)

    def _draw(self, k: int, step: int) -> None:
        if self._drawn[k] != step:
            self._draw_winners(self._winners[k], step, self._cuts[k].start)
            self._drawn[k] = step

    def mine(self, k: int) -> Words:
        """Return this rank's payload of a piece."""
        payload: Words = self.words[k][self._rank]
        return payload

    @override
    def encode(self, piece: int) -> Testable | None:
        k = piece % len(self._cuts)
        self._encode_signs(k)
        self._draw(k, self._step)
        winners, signs = self._winners[k], self._votes[k][0]
        mine = slice(self._rank * winners.words, (self._rank + 1) * winners.words)
        payload = self._packed.pieces[k][mine]
        self._pick(signs, self._rank, winners, payload)
        return None if self._is_host else self._packed.fetch(k, mine)

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        origin, k = divmod(piece, len(self._cuts))
        row = self.words[k][origin]
        return [row, row.nbytes, MPI.BYTE]

    replacing = outgoing

    @override
    def finish(self, piece: int) -> Testable | None:
        k = piece % len(self._cuts)
        with self._counting:
            self._missing[k] -= 1
            complete = not self._missing[k]
        if not complete:  # signs are placed once the last rank's payload is there
            return None
        self._packed.deliver(k)
        winners = self._winners[k]
        self._place(self._packed.pieces[k], winners.words, winners, self._votes[k])
        return self._decode_signs(k)


class SelectionGather(OneBitReducer):
    """Reducer of the signs of one or two winners of each element.

    Parameters as in `SignMerge`, with a codec that is bound to the stream of the winners and to the device's kernels.
    Signs stay on the device: only payloads are in the host's memory.

    Attributes
    ----------
    bits, second
        As in `SelectionPayload`.
    """

    def __init__(self, comm: Communicator, n: int, selection: Selection, reports: int, space: Space = HOST) -> None:
        codec = selection.codec
        model = selection_model(n, comm.size, codec.votes, comm.routes.packed_piece_bytes())
        self._comm, self.at_once = comm, comm.routes.gathers(codec.nbytes(n))
        whole = (range(n),) if n else ()
        self.pieces = whole if self.at_once else pieces(range(n), model.piece_elements, codec.alignment)
        self._payload = SelectionPayload(space, selection, comm.rank, self.pieces)
        self.scratch: list[Words] = [self._payload.bits] if space.is_host else []
        self.bits, self.second = self._payload.bits, self._payload.second
        self.side_channel = SideChannel(comm, reports, codec.nbytes(n) if self.at_once else 0)
        # Newcomers make their aggregators alone, where all is gathered at once, and must take as many tags.
        self._tag = comm.fixed_tag()
        if not self.at_once:
            self._requests = comm.users.persistent(self)
            self._program = gather_program(comm.rank, comm.size, self.pieces)

    @override
    def prepare_step(self, step: int) -> None:
        if self._payload.brief:
            self._payload.draw(step)

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        payload = self._payload
        payload.begin(call.step, work)
        try:
            if self.at_once:
                codes = [words.view(np.uint8) for words in payload.words[0]] if self.pieces else []
                yield from gather_at_once(call, self.side_channel, payload, self._comm.rank, codes, encoded)
            else:
                yield from execute(call, self._program, payload, self._tag, call.traffic, encoded, self._requests)
        finally:
            payload.end()
