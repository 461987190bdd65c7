"""Feedback of cascading compression: partial sums, which are compressed once before they are sent on."""

from __future__ import annotations

import numpy as np

from collectives.annotations import Array, Doubles, Testable, override
from collectives.arrays import Device
from collectives.arrays.elements import SIXTEEN_BIT
from collectives.execution.program import Message, Program
from mpicomp import kernels
from mpicomp.codecs.base import Draw
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.stochastic_sign import StochasticSign, measure
from mpicomp.feedback.base import Feedback, Problem, StepInput, bad_ranks
from mpicomp.feedback.mirror import Mirror
from mpicomp.feedback.nonfinite import largest
from mpicomp.feedback.payloads import Payloads
from mpicomp.feedback.rounds import Round
from mpicomp.kernels.streams import Stream


class PartialSums(Feedback):
    """Partial sums of one vector in float32; nothing is kept from step to step.

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
    dtype : str
        Type of the vectors.
    normalise : bool
        As in `mpicomp.CascadingSSDM`.

    Attributes
    ----------
    held, landing : Payloads
        Codes of this rank's pieces, and codes that other ranks have sent.
    """

    n_reports = 1

    def __init__(
        self,
        device: Device,
        codec: StochasticSign,
        stream: Stream,
        rank: int,
        program: Program,
        dtype: str,
        normalise: bool,
    ) -> None:
        super().__init__(device, {})
        self._codec, self._stream, self._rank, self._size = codec, stream, rank, program.plan.size
        self._pieces, chains, self._dtype, self._normalises = program.pieces, program.chains, dtype, normalise
        # number of the receive after which a piece is compressed; -1: it is compressed when it is encoded
        self._last_merge = [
            max((message.index for message in chain if not message.is_send and message.held_weight), default=-1)
            for chain in chains
        ]
        # flags: the complete sum comes from another rank
        self._replaced = [
            last >= 0 and not chain[last].held_weight for chain, last in zip(chains, program.last_recv, strict=True)
        ]
        self._sums = device.zeros(self._pieces[-1].stop if self._pieces else 0, "float32")
        self._length, self._mean_length = Mirror(device, device.zeros(1, "float32")), 0.0
        self.held = Payloads(device, codec, [len(cut) for cut in self._pieces], flags=False)
        # on a device one message travels while another is added and compressed
        buffers = [program.longest_piece] * (1 if self.on_host else 2)
        self.landing = Payloads(device, codec, buffers, flags=False)
        self._nothing = self._values = self._out = device.zeros(0, "float32")
        self._step = 0

    @override
    def rounds(self) -> tuple[Round, ...]:
        return (Round(self.encode, self.decode, self.merge),)

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._values, self._out, self._step = call.values, call.out, call.step
        if self._values.itemsize == 8:
            self.launch(_hold, self._values, self._sums)
            self._values = self._sums

    @override
    def end(self) -> None:
        super().end()
        self._values = self._out = self._nothing

    # Norms, which travel before the codes ----------------------------------------------------------------------------

    @override
    def reports_first(self, step: int) -> bool:
        return True

    @override
    def measure(self) -> Testable | None:
        self.launch(measure, self._values, self._length.there)
        return self._length.fetch()

    @override
    def report(self, row: Doubles) -> None:
        row[0] = self._length.here[0]

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        bad = bad_ranks(~np.isfinite(reports[:, 0]))
        self._mean_length = float(reports[:, 0].mean())
        return Problem(bad) if bad else None

    # Pieces ----------------------------------------------------------------------------------------------------------

    @override
    def encode(self, piece: int) -> Testable | None:
        if self._values is not self._sums:
            cut = self._pieces[piece]
            self.launch(_copy, self._values[cut.start : cut.stop], self._part(piece))
        return self._compress(piece) if self._last_merge[piece] < 0 else None

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Add a code that has landed to the sum of its piece, and compress the sum if nothing more is added to it."""
        piece = message.piece
        self.landing.deliver(buffer)
        payload = self.landing.there[buffer][: self.held.host[piece].nbytes]
        self.launch(self._codec.add, payload, self._part(piece))
        return self._compress(piece) if message.index == self._last_merge[piece] else self.device.done()

    @override
    def decode(self, piece: int) -> Testable | None:
        if self._replaced[piece]:
            self.held.deliver(piece)
        self.launch(self._decode, piece)
        return self.device.done()

    def _part(self, piece: int) -> Array:
        cut = self._pieces[piece]
        return self._sums[cut.start : cut.stop]

    def _decode(self, piece: int) -> None:
        self._codec.decode(self.held.there[piece], self._part(piece), weight=1)

    def _compress(self, piece: int) -> Testable | None:
        """Compress the sum of a piece. Returns a handle that completes once the payload can be sent."""
        draw = Draw(self._stream, self._step, self._rank, offset=self._pieces[piece].start)
        self.launch(self._encode, piece, draw)
        return self.held.fetch(piece)

    def _encode(self, piece: int, draw: Draw) -> None:
        part = self._part(piece)
        kernels.beside(part).arrays.xp.clip(part, -FLOAT32_MAX, FLOAT32_MAX, out=part)
        self._codec.encode(part, self.held.there[piece], draw=draw)

    # The result ------------------------------------------------------------------------------------------------------

    @override
    def settle(self, call: StepInput) -> Testable | None:
        """Divide the sums, give them the mean of the ranks' norms if that is wanted, and write the result."""
        self.launch(kernels.beside(self._sums).arrays.divide, self._sums, self._size)
        if self._normalises:
            self.launch(measure, self._sums, self._length.there)
            self.launch(_rescale, self._sums, self._length.there, self._mean_length)
        self.launch(_write, self._sums, self._out, self._dtype)
        return self.device.done()


def _copy(source: Array, target: Array) -> None:
    target[:] = source


def _hold(values: Array, out: Array) -> None:
    """Round float64 to float32, clipping finite numbers to its range. Infinity remains, so that the norm shows it."""
    xp = kernels.beside(values).arrays.xp
    out[:] = xp.where(xp.isinf(values), values, xp.clip(values, -FLOAT32_MAX, FLOAT32_MAX))


def _rescale(sums: Array, length: Array, wanted: float) -> None:
    """Multiply sums whose norm is `length`, [1], by the factor that gives them the wanted norm; by 0 for norm 0."""
    on = kernels.beside(sums).arrays
    wide = on.convert(length, "float64")
    divisor = on.xp.where(wide > 0, wide, on.xp.ones_like(wide))
    sums *= on.convert(on.xp.where(wide > 0, wanted / divisor, on.xp.zeros_like(wide)), "float32")


def _write(sums: Array, out: Array, dtype: str) -> None:
    """Round to the type of results. Growing amplitudes soon exceed float16, so 16-bit results are clipped."""
    if dtype not in SIXTEEN_BIT:
        out[:] = sums
        return
    on, most = kernels.beside(sums), largest(dtype)
    on.arrays.xp.clip(sums, -most, most, out=sums)
    on.sixteen_bits.narrow(sums, dtype == "bfloat16", on.arrays.view(out, "uint16"))
