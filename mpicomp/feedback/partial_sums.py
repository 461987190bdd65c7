"""Feedback of cascading compression: partial sums, which are compressed once before they are sent on."""

from __future__ import annotations

import numpy as np

from collectives.annotations import Array, Doubles, override
from collectives.arrays.elements import NARROW
from collectives.execution.program import Message, Program
from mpicomp.codecs.base import Draw
from mpicomp.codecs.bucketed import FLOAT32_MAX
from mpicomp.codecs.stochastic_sign import StochasticSign, measure
from mpicomp.feedback.base import Feedback, Problem, StepInput, bad_ranks, narrow_into
from mpicomp.feedback.nonfinite import largest
from mpicomp.feedback.payloads import Payloads
from mpicomp.feedback.rounds import Round
from mpicomp.kernels.streams import Stream
from mpicomp.spaces import HOST


class PartialSums(Feedback):
    """Partial sums of one vector in float32; nothing is kept from step to step.

    A rank compresses its sum of a piece once in a step, after the last merge into it, and sends that code on, as a
    partial or as the complete sum.

    Parameters
    ----------
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
        self, codec: StochasticSign, stream: Stream, rank: int, program: Program, dtype: str, normalise: bool
    ) -> None:
        super().__init__(HOST, {})
        self._codec, self._stream, self._rank, self._size = codec, stream, rank, program.plan.size
        self._pieces, chains, self._dtype, self._normalises = program.pieces, program.chains, dtype, normalise
        # number of the receive after which a piece is compressed; -1: it is compressed when it is encoded
        self._last_merge = [
            max((message.index for message in chain if not message.is_send and message.held_weight), default=-1)
            for chain in chains
        ]
        self._sums = np.zeros(self._pieces[-1].stop if self._pieces else 0, np.float32)
        self._length, self._mean_length = np.zeros(1, np.float32), 0.0
        self.held = Payloads(HOST, codec, [len(cut) for cut in self._pieces], flags=False)
        self.landing = Payloads(HOST, codec, [program.longest_piece], flags=False)
        self._nothing = self._values = self._out = np.zeros(0, np.float32)
        self._step = 0

    @override
    def rounds(self) -> tuple[Round, ...]:
        return (Round(self.encode, self.decode, self.merge),)

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._values, self._out, self._step = call.values, call.out, call.step
        if self._values.itemsize == 8:
            # finite numbers are clipped to float32; infinity remains, so that the norm shows it
            clipped = np.clip(self._values, -FLOAT32_MAX, FLOAT32_MAX)
            self._sums[:] = np.where(np.isinf(self._values), self._values, clipped)
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
    def measure(self) -> None:
        measure(self._values, self._length)

    @override
    def report(self, row: Doubles) -> None:
        row[0] = self._length[0]

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        bad = bad_ranks(~np.isfinite(reports[:, 0]))
        self._mean_length = float(reports[:, 0].mean())
        return Problem(bad) if bad else None

    # Pieces ----------------------------------------------------------------------------------------------------------

    @override
    def encode(self, piece: int) -> None:
        if self._values is not self._sums:
            cut = self._pieces[piece]
            self._part(piece)[:] = self._values[cut.start : cut.stop]
        if self._last_merge[piece] < 0:
            self._compress(piece)

    def merge(self, message: Message, buffer: int) -> None:
        """Add a code that has landed to the sum of its piece, and compress the sum if nothing more is added to it."""
        piece = message.piece
        payload = self.landing.host[buffer][: self.held.host[piece].nbytes]
        self._codec.add(payload, self._part(piece))
        if message.index == self._last_merge[piece]:
            self._compress(piece)

    @override
    def decode(self, piece: int) -> None:
        self._codec.decode(self.held.host[piece], self._part(piece), weight=1)

    def _part(self, piece: int) -> Array:
        cut = self._pieces[piece]
        return self._sums[cut.start : cut.stop]

    def _compress(self, piece: int) -> None:
        draw, part = Draw(self._stream, self._step, self._rank, offset=self._pieces[piece].start), self._part(piece)
        np.clip(part, -FLOAT32_MAX, FLOAT32_MAX, out=part)
        self._codec.encode(part, self.held.host[piece], draw=draw)

    # The result ------------------------------------------------------------------------------------------------------

    @override
    def end_decoding(self, call: StepInput) -> None:
        """Divide the sums, give them the mean of the ranks' norms if that is wanted, and write the result."""
        sums, out, dtype = self._sums, self._out, self._dtype
        self.kernels.arrays.divide(sums, self._size)
        if self._normalises:
            measure(sums, self._length)
            length = np.float64(self._length[0])
            sums *= np.float32(self._mean_length / length if length > 0 else 0)
        if dtype in NARROW:  # clipped, as growing amplitudes soon exceed float16
            most = largest(dtype)
            np.clip(sums, -most, most, out=sums)
            narrow_into(sums, dtype, out)
        else:
            out[:] = sums
