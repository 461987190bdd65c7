"""Reducer of cascading compression: every hop decodes, adds and encodes again, which Marsit avoids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import imul

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Array, Testable, override
from collectives.arrays import Device
from collectives.arrays.elements import SIXTEEN_BIT
from collectives.execution.payload import MergedPayload, MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from collectives.progress.polling import done
from mpicomp import kernels
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.nonfinite import largest
from mpicomp.aggregator.parts import MessageModel, Reducer, VectorSpec
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.codecs.base import Draw
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.stochastic_sign import StochasticSign, measure
from mpicomp.feedback.base import bad_ranks
from mpicomp.feedback.mirror import Mirror
from mpicomp.feedback.payloads import Payloads
from mpicomp.kernels.streams import Stream


class Cascade(Reducer):
    """Reducer that sums along the plan of the communicator's topology.

    Parameters
    ----------
    comm : Communicator
    spec : VectorSpec
    model : MessageModel
    normalise : bool
        As in `mpicomp.CascadingSSDM`.
    payload : callable
        Creates the payload of a program.
    """

    def __init__(
        self,
        comm: Communicator,
        spec: VectorSpec,
        model: MessageModel,
        normalise: bool,
        payload: Callable[[Program], CascadePayload],
    ) -> None:
        self._size, self._normalise, self._tag = comm.size, normalise, comm.fixed_tag()
        topology = comm.select(model.nbytes(spec.n, 1))
        self.program = comm.program(topology, spec.n, model.alignment, model.piece_elements)
        self._payload = payload(self.program)
        self._side_channel = SideChannel(comm, 1)

    @property
    @override
    def can_undo(self) -> bool:
        return True  # nothing is kept from step to step

    @override
    def commit(self) -> None:
        self._payload.end()

    roll_back = commit

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        payload, channel = self._payload, self._side_channel
        payload.begin(call.values, call.step)
        yield from done(call, payload.measure(payload.values))
        channel.mine[0] = payload.length
        yield from channel.swap(call, call.traffic)
        norms = channel.everyones[:, 0]
        bad = bad_ranks(~np.isfinite(norms))
        if bad:
            raise call.non_finite(bad)
        yield from execute(call, self.program, payload, self._tag, call.traffic)
        payload.divide(self._size)
        if self._normalise:
            yield from done(call, payload.measure(payload.sums))
            payload.multiply(np.float32(norms.mean() / payload.length if payload.length > 0 else 0))
        yield from done(call, payload.write(call.out, call.spec.dtype))


class CascadePayload(MergedPayload):
    """Partial sums of one vector in float32.

    A rank compresses its sum of a piece once in a step, after the last merge into it, and sends that code on, as a
    partial or as the complete sum.

    Parameters
    ----------
    device : Device
        Device that holds the sums; only payloads cross to the host.
    codec : StochasticSign
    stream : Stream
    rank : int
    program : Program

    Attributes
    ----------
    values : array[n]
        This rank's vector.
    sums : float32[n]
        Partial sums; after the program the sum of all ranks.
    """

    brief = False

    def __init__(self, device: Device, codec: StochasticSign, stream: Stream, rank: int, program: Program) -> None:
        self._device, self._on_host = device, device.name == "cpu"
        # on a device one message travels while another is added and compressed
        self.receive_buffers = 1 if self._on_host else 2
        self._codec, self._stream, self._rank = codec, stream, rank
        self._pieces, chains = program.pieces, program.chains
        # number of the receive after which a piece is compressed; -1: it is compressed when it is encoded
        self._last_merge = [
            max((message.index for message in chain if not message.is_send and message.held_weight), default=-1)
            for chain in chains
        ]
        # flags: the complete sum comes from another rank
        self._replaced = [
            last >= 0 and not chain[last].held_weight for chain, last in zip(chains, program.last_recv, strict=True)
        ]
        self.sums = device.zeros(self._pieces[-1].stop if self._pieces else 0, "float32")
        self._length = Mirror(device, device.zeros(1, "float32"))
        self._held = Payloads(device, codec, [len(cut) for cut in self._pieces], flags=False)
        self._landing = Payloads(device, codec, [program.longest_piece] * self.receive_buffers, flags=False)
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in self._held.host]
        self._nothing = self.values = device.zeros(0, "float32")
        self.step = 0

    def _launch(self, work: Callable[..., object], *operands: object) -> None:
        if self._on_host:
            work(*operands)
        else:
            self._device.run(partial(work, *operands))

    # Before and after the program ------------------------------------------------------------------------------------

    @property
    def length(self) -> float:
        """Norm that was measured last."""
        return float(self._length.here[0])

    def begin(self, values: Array, step: int) -> None:
        """Start another step with a float32 or float64 vector."""
        self.values, self.step = values, step
        if values.itemsize == 8:
            self._launch(_hold, values, self.sums)
            self.values = self.sums

    def end(self) -> None:
        """Drop the reference to the caller's vector, so that it can be freed."""
        self.values = self._nothing

    def measure(self, vector: Array) -> Testable | None:
        """Measure the norm of a float32 vector. Returns a handle that completes once `length` is that norm."""
        self._launch(measure, vector, self._length.there)
        return self._length.fetch()

    def divide(self, divisor: int) -> None:
        """Divide the sums."""
        self._launch(kernels.beside(self.sums).arrays.divide, self.sums, divisor)

    def multiply(self, factor: np.float32) -> None:
        """Multiply the sums."""
        self._launch(imul, self.sums, float(factor))

    def write(self, out: Array, dtype: str) -> Testable | None:
        """Write the sums to `out`, of this type. Returns a handle that completes once they are there."""
        self._launch(_write, self.sums, out, dtype)
        return self._device.done()

    # Messages --------------------------------------------------------------------------------------------------------

    @override
    def encode(self, piece: int) -> Testable | None:
        if self.values is not self.sums:
            cut = self._pieces[piece]
            self._launch(_copy, self.values[cut.start : cut.stop], self._part(piece))
        return self._compress(piece) if self._last_merge[piece] < 0 else None

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        return self._messages[piece]

    replacing = outgoing

    @override
    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        nbytes = self._messages[piece][1]
        return [self._landing.host[buffer][:nbytes], nbytes, MPI.BYTE]

    @override
    def prepare(self, message: Message, buffer: int) -> None:
        return  # signs cannot be drawn ahead, as their probabilities depend on the data

    @override
    def merge(self, message: Message, buffer: int) -> Testable | None:
        piece = message.piece
        self._landing.deliver(buffer)
        self._launch(self._codec.add, self._landing.there[buffer][: self._messages[piece][1]], self._part(piece))
        return self._compress(piece) if message.index == self._last_merge[piece] else self._device.done()

    @override
    def finish(self, piece: int) -> Testable | None:
        if self._replaced[piece]:
            self._held.deliver(piece)
        self._launch(self._decode, piece)
        return self._device.done()

    def _part(self, piece: int) -> Array:
        cut = self._pieces[piece]
        return self.sums[cut.start : cut.stop]

    def _decode(self, piece: int) -> None:
        self._codec.decode(self._held.there[piece], self._part(piece), weight=1)

    def _compress(self, piece: int) -> Testable | None:
        """Compress the sum of a piece. Returns a handle that completes once the payload can be sent."""
        draw = Draw(self._stream, self.step, self._rank, offset=self._pieces[piece].start)
        self._launch(self._encode, piece, draw)
        return self._held.fetch(piece)

    def _encode(self, piece: int, draw: Draw) -> None:
        part = self._part(piece)
        kernels.beside(part).arrays.xp.clip(part, -FLOAT32_MAX, FLOAT32_MAX, out=part)
        self._codec.encode(part, self._held.there[piece], draw=draw)


def _copy(source: Array, target: Array) -> None:
    target[:] = source


def _hold(values: Array, out: Array) -> None:
    """Round float64 to float32, clipping finite numbers to its range. Infinity remains, so that the norm shows it."""
    xp = kernels.beside(values).arrays.xp
    out[:] = xp.where(xp.isinf(values), values, xp.clip(values, -FLOAT32_MAX, FLOAT32_MAX))


def _write(sums: Array, out: Array, dtype: str) -> None:
    """Round to the type of results. Growing amplitudes soon exceed float16, so 16-bit results are clipped."""
    if dtype not in SIXTEEN_BIT:
        out[:] = sums
        return
    on, most = kernels.beside(sums), largest(dtype)
    on.arrays.xp.clip(sums, -most, most, out=sums)
    on.sixteen_bits.narrow(sums, dtype == "bfloat16", on.arrays.view(out, "uint16"))
