"""Signs of shared winners: all ranks draw the same winner of each element, and an all-gather sends the winners' signs.

Messages are not merged on the way: pieces of all ranks' payloads go round a ring unchanged. Payloads of a small vector
travel with the ranks' reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from collectives import Communicator
from collectives.annotations import Words, override
from collectives.arrays import HOST_DEVICE, Device
from collectives.execution.pipelined import execute
from collectives.execution.program import gather_program, pieces
from collectives.schedules.ring import AllGather
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import MessageModel
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.codecs.shared_selection import Selection, SharedSelection
from mpicomp.reducers.all_gather import gather_at_once
from mpicomp.reducers.selection_payload import SelectionPayload
from mpicomp.reducers.sign_merge import OneBitReducer
from mpicomp.step import Work

PIECE_BYTES = 128 << 10  # longest message of one rank's payload


def selection_model(n: int, ranks: int, winners: int, piece_bytes: int) -> MessageModel:
    """Return the message model of a method; message sizes do not depend on the weight."""
    codec = SharedSelection(ranks, winners)
    longest = 8 * ranks * min(piece_bytes, PIECE_BYTES) // codec.votes // codec.alignment * codec.alignment
    return MessageModel(codec.nbytes, max(codec.alignment, longest), codec.alignment, AllGather(), decoded_once=True)


class SelectionGather(OneBitReducer):
    """Reducer of the signs of one or two winners of each element.

    Parameters as in `SignMerge`, with a codec that is bound to the stream of the winners and to the device's kernels.
    Signs stay on the device: only payloads are in the host's memory.

    Attributes
    ----------
    bits, second
        As in `SelectionPayload`.
    """

    def __init__(
        self, comm: Communicator, n: int, selection: Selection, reports: int, device: Device = HOST_DEVICE
    ) -> None:
        codec = selection.codec
        model = selection_model(n, comm.size, codec.votes, comm.packed_piece_bytes())
        self._comm, self.at_once = comm, comm.gathers(codec.nbytes(n))
        whole = (range(n),) if n else ()
        self.pieces = whole if self.at_once else pieces(range(n), model.piece_elements, codec.alignment)
        self._payload = SelectionPayload(device, selection, comm.rank, self.pieces)
        self.scratch: list[Words] = [self._payload.bits] if device is HOST_DEVICE else []
        self.bits, self.second = self._payload.bits, self._payload.second
        self.side_channel = SideChannel(comm, reports, codec.nbytes(n) if self.at_once else 0)
        if not self.at_once:
            self._tag, self._requests = comm.fixed_tag(), comm.persistent(self)
            self._program = gather_program(comm.rank, comm.size, self.pieces)

    @override
    def prepare_step(self, step: int) -> None:
        if self._payload.brief:
            self._payload.draw(step)

    @override
    def run(self, call: VectorCall, encode: Work, decode: Work, encoded: Callable[[], None]) -> Iterator[bool]:
        payload = self._payload
        payload.begin(call.step, encode, decode)
        try:
            if self.at_once:
                codes = [words.view(np.uint8) for words in payload.words[0]] if self.pieces else []
                yield from gather_at_once(call, self.side_channel, payload, self._comm.rank, codes, encoded)
            else:
                yield from execute(call, self._program, payload, self._tag, call.traffic, encoded, self._requests)
        finally:
            payload.end()
