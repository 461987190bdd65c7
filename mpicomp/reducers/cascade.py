"""Every hop decodes, adds and encodes again: what cascading compression does, and Marsit avoids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from collectives.memory import narrow
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.nonfinite import largest
from mpicomp.aggregator.parts import MessageModel, Reducer, VectorSpec
from mpicomp.codecs.base import Draw
from mpicomp.codecs.stochastic_sign import StochasticSign, norm
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.side_channel import SideChannel, bad_ranks

_LARGEST = float(np.finfo(np.float32).max)


class Cascade(Reducer):
    """Sums of one vector along the plan of the communicator's topology; `normalise` as in `mpicomp.CascadingSSDM`."""

    def __init__(
        self,
        comm: Communicator,
        spec: VectorSpec,
        codec: StochasticSign,
        stream: Stream,
        model: MessageModel,
        normalise: bool,
    ) -> None:
        self._comm, self._normalise, self._tag = comm, normalise, comm.fixed_tag()
        self.program = comm.program(comm.select(codec.nbytes(spec.n)), spec.n, model.alignment, model.piece_elements)
        self._payload = CascadePayload(self.program, comm.rank, codec, stream)
        self._side_channel = SideChannel(comm, 1)

    def commit(self) -> None:
        """See `Reducer`."""
        self._payload.values = self._payload.nothing

    roll_back = commit

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
        payload, channel = self._payload, self._side_channel
        values = call.values
        if values.dtype == np.float64:  # infinity stays infinity, of which the norm tells
            values = np.where(np.isinf(values), values, np.clip(values, -_LARGEST, _LARGEST)).astype(np.float32)
        payload.begin(values, call.step)
        channel.mine[0] = norm(payload.values)
        yield from channel.swap(call, call.traffic)
        norms = channel.everyones[:, 0]
        bad = bad_ranks(~np.isfinite(norms))
        if bad:
            raise call.non_finite(bad)
        yield from execute(call, self.program, payload, self._tag, call.traffic)
        result = payload.sums
        np.divide(result, self._comm.size, out=result)
        if self._normalise:
            length = float(norm(result))
            result *= np.float32(norms.mean() / length if length > 0 else 0)
        if call.spec.sixteen_bit:
            most = np.float32(largest(call.spec.dtype))  # amplitudes grow from hop to hop, and float16 ends soon
            narrow(np.clip(result, -most, most, out=result), call.spec.dtype, call.out)
        else:
            call.out[:] = result


class CascadePayload:
    """Partial sums in float32; compressed just before they are sent."""

    brief = False
    receive_buffers = 1

    def __init__(self, program: Program, rank: int, codec: StochasticSign, stream: Stream) -> None:
        self._codec = codec
        self._pieces, self._size, self._rank, self._stream = program.pieces, program.plan.size, rank, stream
        longest = program.longest_piece
        n = self._pieces[-1].stop if self._pieces else 0
        self.sums = np.empty(n, np.float32)
        self._bytes = [np.zeros(self._codec.nbytes(len(cut)), np.uint8) for cut in self._pieces]
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in self._bytes]
        self._incoming = np.empty(self._codec.nbytes(longest), np.uint8)
        self._decoded = np.empty(longest, np.float32)  # one message is merged at a time
        self.nothing = self.values = np.empty(0, np.float32)
        self.step = 0

    def encode(self, piece: int) -> None:
        """Copy this rank's piece."""
        cut = self._pieces[piece]
        self.sums[cut.start : cut.stop] = self.values[cut.start : cut.stop]
        if self._size == 1:
            self._compress(piece)

    def _compress(self, piece: int) -> None:
        cut = self._pieces[piece]
        part = self.sums[cut.start : cut.stop]
        np.nan_to_num(part, copy=False, posinf=_LARGEST, neginf=-_LARGEST)
        # one rank compresses an element once in each phase at most: the weight tells those apart
        draw = Draw(self._stream, self.step, self._rank, self._compressed.get(piece, 0), cut.start // 512 * 512)
        self._compressed[piece] = draw.ordinal + 1
        self._codec.encode(part, self._bytes[piece], draw=draw)

    def begin(self, values: NDArray[Any], step: int) -> None:
        """Go to another vector and step."""
        self.values, self.step = values, step
        self._compressed: dict[int, int] = {}
        self._final: set[int] = set()

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`: a partial sum is compressed just before it is sent."""
        if piece not in self._final:
            self._compress(piece)
        return self._messages[piece]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        self._final.add(piece)
        return self._messages[piece]

    def incoming(self, piece: int, buffer: int, weight: int) -> Any:
        """See `Payload`."""
        nbytes = self._bytes[piece].size
        return [self._incoming[:nbytes], nbytes, MPI.BYTE]

    def prepare(self, message: Message, buffer: int) -> None:
        """See `Payload`: nothing can be drawn ahead, as the probabilities are in the data."""

    def merge(self, message: Message, buffer: int) -> None:
        """Decode a message, add it, and compress a complete sum."""
        cut = self._pieces[message.piece]
        decoded = self._decoded[: len(cut)]
        self._codec.decode(self._incoming[: self._bytes[message.piece].size], decoded, weight=message.weight)
        part = self.sums[cut.start : cut.stop]
        with np.errstate(over="ignore"):
            np.add(part, decoded, out=part)
        if message.weight + message.held_weight == self._size:
            self._compress(message.piece)
            self._final.add(message.piece)

    def finish(self, piece: int) -> None:
        """Decode the complete sum."""
        cut = self._pieces[piece]
        self._codec.decode(self._bytes[piece], self.sums[cut.start : cut.stop], weight=self._size)
