"""Cascading compression: every hop decodes, adds and compresses again. The published failure, kept to show it.

    a hop receives Q(p), holds h:   sends Q(h + decode(Q(p))),   Q = SSDM's stochastic sign with one norm per chunk

Each Q is unbiased, but its error is sqrt(D) times the signal and is compressed again at the next hop: the amplitude
grows like D^((M-1)/2) and the signs of the result match those of the mean no better than a coin.

Reference: Marsit (arXiv 2204.06787), section 3.1 and Table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.execution.program import Message, Program
from collectives.memory import narrow
from mpicomp.aggregator.base import MessageModel, Synchronize, VectorAggregator
from mpicomp.aggregator.nonfinite import largest, raise_non_finite
from mpicomp.codecs.base import Draw
from mpicomp.codecs.options import flag, integer
from mpicomp.codecs.stochastic_sign import StochasticSign, norm
from mpicomp.kernels.streams import Stream

_CODEC = StochasticSign()
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class CascadingSSDM:
    """Options of cascading compression.

    Parameters
    ----------
    normalise : bool
        Scale the result to the mean of the ranks' norms and keep its direction: the growth of the amplitude is undone
        (at the cost of one number per chunk and rank), the noise is not.
    seed : int
        Equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    normalise: bool = False
    seed: int = 0

    synchronize: ClassVar[Synchronize] = "gradients"
    uses_tensor_lengths: ClassVar[bool] = False

    def __post_init__(self) -> None:
        flag(self, "normalise")
        integer(self, "seed")

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> CascadingAggregator:
        """See `Algorithm.start`."""
        return CascadingAggregator(self, comm, n, dtype, vector_id)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: one message a chunk, with one norm."""
        return MessageModel(_CODEC.nbytes, n + _CODEC.alignment, _CODEC.alignment)


class _Payload:
    """Partial sums in float32; compressed just before they are sent."""

    brief = False
    slots = 1

    def __init__(self, program: Program, rank: int, stream: Stream) -> None:
        self._pieces, self._size, self._rank, self._stream = program.pieces, program.plan.size, rank, stream
        longest = program.longest_piece
        n = self._pieces[-1].stop if self._pieces else 0
        self.sums = np.empty(n, np.float32)
        self._bytes = [np.zeros(_CODEC.nbytes(len(cut)), np.uint8) for cut in self._pieces]
        self._incoming = np.empty(_CODEC.nbytes(longest), np.uint8)
        self._decoded = np.empty(longest, np.float32)
        self.values: NDArray[Any] = self.sums
        self.step = 0
        self.finite = True

    def encode(self, piece: int) -> None:
        cut = self._pieces[piece]
        self.sums[cut.start : cut.stop] = self.values[cut.start : cut.stop]
        self.finite &= bool(np.isfinite(norm(self.sums[cut.start : cut.stop])))
        if self._size == 1:
            self._compress(piece)

    def _compress(self, piece: int) -> None:
        cut = self._pieces[piece]
        part = self.sums[cut.start : cut.stop]
        np.nan_to_num(part, copy=False, posinf=_LARGEST, neginf=-_LARGEST)
        # one rank compresses an element once in each phase at most: the weight tells those apart
        draw = Draw(self._stream, self.step, self._rank, self._compressed.get(piece, 0), cut.start // 512 * 512)
        self._compressed[piece] = draw.ordinal + 1
        _CODEC.encode(part, self._bytes[piece], draw=draw)

    def begin(self, values: NDArray[Any], step: int) -> None:
        self.values, self.step, self.finite = values, step, True
        self._compressed: dict[int, int] = {}
        self._final: set[int] = set()

    def outgoing(self, piece: int, weight: int) -> Any:
        if piece not in self._final:
            self._compress(piece)
        return self._buffer(self._bytes[piece])

    def replacing(self, piece: int, weight: int) -> Any:
        self._final.add(piece)
        return self._buffer(self._bytes[piece])

    def incoming(self, piece: int, slot: int, weight: int) -> Any:
        return self._buffer(self._incoming[: self._bytes[piece].size])

    def prepare(self, message: Message, slot: int) -> None:
        """Nothing can be drawn ahead: the probabilities are in the data."""

    def merge(self, message: Message, slot: int) -> None:
        cut = self._pieces[message.piece]
        decoded = self._decoded[: len(cut)]
        _CODEC.decode(self._incoming[: self._bytes[message.piece].size], decoded, weight=message.weight)
        part = self.sums[cut.start : cut.stop]
        with np.errstate(over="ignore"):
            np.add(part, decoded, out=part)
        if message.weight + message.held_weight == self._size:
            self._compress(message.piece)
            self._final.add(message.piece)

    def finish(self, piece: int) -> None:
        cut = self._pieces[piece]
        _CODEC.decode(self._bytes[piece], self.sums[cut.start : cut.stop], weight=self._size)

    @staticmethod
    def _buffer(payload: NDArray[np.uint8]) -> Any:
        return [payload, payload.nbytes, MPI.BYTE]


class CascadingAggregator(VectorAggregator):
    """Keeps nothing but the step counter."""

    def __init__(
        self, options: CascadingSSDM, comm: Communicator, n: int, dtype: DTypeLike | str, vector_id: int
    ) -> None:
        super().__init__(options, comm, n, dtype, vector_id)
        self.options = options
        topology = comm.select(_CODEC.nbytes(n))
        shape = options.message_model(n, self.dtype, comm.size, 0)
        self._program = comm.program(topology, n, shape.alignment, shape.piece_elements)
        self._payload = _Payload(self._program, comm.rank, Stream(options.seed, vector_id, "stochastic sign"))

    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        payload, size = self._payload, self.comm.size
        if values.dtype == np.float64:  # infinity stays infinity, of which the norm tells
            bounded = np.clip(values, -_LARGEST, _LARGEST)
            values = np.where(np.isinf(values), values, bounded).astype(np.float32)
        payload.begin(values, self.step)
        own_norm = float(norm(payload.values))
        gathered = np.zeros(size)
        request = self.comm.mpi_comm.Iallgather(np.array([own_norm]), gathered)
        self.comm.wait(request, lambda: f"rank {self.comm.rank} of {size}: the ranks' norms do not arrive")
        traffic.bytes_sent += 8 * (size - 1)
        traffic.messages += size - 1
        if not np.isfinite(gathered).all():
            raise_non_finite(self.comm, not np.isfinite(own_norm), f"vector {self.vector_id}, step {self.step}")
        self.comm.execute(self._program, payload, self._tag, traffic)
        result = payload.values = payload.sums  # the caller's vector is his to free
        np.divide(result, size, out=result)
        if self.options.normalise:
            length = float(norm(result))
            result *= np.float32(gathered.mean() / length if length > 0 else 0)
        if self._wide is None:
            out[:] = result
        else:
            most = np.float32(largest(self.dtype))  # amplitudes grow from hop to hop, and float16 ends soon
            narrow(np.clip(result, -most, most, out=result), self.dtype, out)
