"""Codes that are gathered: every rank gets every rank's payload, decodes them in rank order, and takes the mean.

    p = g + what feedback adds;   every rank sends Q(p) to all;   result = mean of the Q(p)

Nothing is merged on the way, so a rank sends, and keeps for the time of a call, M payloads: the volume grows with the
number of ranks. Pieces go round a ring while others are encoded and decoded, whatever the topology, except over a star:
there the root alone gets all codes, and sends the mean back as it is. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.execution.gather_program import gather_program
from collectives.execution.partition import pieces
from collectives.execution.program import Program
from collectives.schedules.all_gather import AllGather
from collectives.schedules.star import Star
from mpicomp.aggregator.base import Algorithm, MessageModel, StateKind, Synchronize, VectorAggregator
from mpicomp.codecs.base import Codec, sent_bytes, varies
from mpicomp.codecs.error_feedback import Feedback
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.coded import CodedAggregator, FeedbackEncoder, buffers, piece_elements, take_mean
from mpicomp.reducers.two_pass import TwoPassPayload, route

BRIEF_ELEMENTS = 1 << 14  # up to here encoding takes less than keeping account of pieces


class AllGatherPayload:
    """Every rank's payloads of a vector; see `collectives.execution.payload.Payload`.

    Parameters
    ----------
    program : Program
        By `gather_program`.
    worker : FeedbackEncoder
    put : callable
        ``put(cut, decode, spare)`` lets ``decode(array)`` write the result of a piece; `spare` is long enough for it.
    """

    slots = 0
    fixed: bool  # whether messages have the same lengths at every step

    def __init__(self, program: Program, worker: FeedbackEncoder, put: Any) -> None:
        size = program.plan.size
        self._cuts = program.pieces[: len(program.pieces) // size]
        n = self._cuts[-1].stop if self._cuts else 0
        self.brief = n <= BRIEF_ELEMENTS
        self._worker, self._put, self._size = worker, put, size
        self._payloads = buffers([worker.codec.nbytes(len(cut)) for cut in program.pieces])
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in self._payloads]
        self.fixed = not varies(worker.codec)
        self._missing = [size] * len(self._cuts)
        self._mean = np.empty(program.longest_piece, worker.dtype)
        self._decoded = np.empty_like(self._mean)
        self.values: NDArray[Any] = self._mean

    def begin(self, values: NDArray[Any], step: int) -> None:
        """Go to another vector and step."""
        self.values = values
        self._worker.begin(step)
        self._missing = [self._size] * len(self._cuts)

    def encode(self, piece: int) -> None:
        """See `Payload`."""
        cut = self._cuts[piece % len(self._cuts)]
        self._worker.encode(self.values[cut.start : cut.stop], cut, self._payloads[piece])

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        if self.fixed:
            return self._messages[piece]
        payload = self._payloads[piece]
        return [payload, sent_bytes(self._worker.codec, payload, len(self._cuts[piece % len(self._cuts)])), MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]

    def finish(self, piece: int) -> None:
        """See `Payload`: once the last rank's is there, decode all in rank order."""
        count = len(self._cuts)
        k = piece % count
        self._missing[k] -= 1
        if self._missing[k]:
            return
        codec, payloads, decoded = self._worker.codec, self._payloads[k::count], self._decoded[: len(self._cuts[k])]
        self._put(self._cuts[k], lambda out: take_mean(codec, payloads, out, decoded), self._mean)


class AllGatherAggregator(CodedAggregator):
    """Keeps the step counter and, with feedback, the residual.

    Parameters
    ----------
    algorithm, comm, n, dtype, vector_id
        As in `Algorithm.start`.
    codec : Codec
    feedback : Feedback, optional
    seed : int
    """

    state_kinds: ClassVar[dict[str, StateKind]] = {**VectorAggregator.state_kinds, "residual": "mean"}

    def __init__(
        self,
        algorithm: Algorithm,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        codec: Codec,
        feedback: Feedback | None,
        seed: int = 0,
    ) -> None:
        super().__init__(algorithm, comm, n, dtype, vector_id)
        star, back = isinstance(comm.topology, Star), FullPrecision(self.dtype)
        longest = piece_elements(codec, n, comm.packed_piece_bytes(), back if star else None)
        if star:
            self._program = comm.program(route(comm), n, codec.alignment, longest)
        else:
            self._program = gather_program(comm.rank, comm.size, pieces(range(n), longest, codec.alignment))
        stream, here = Stream(seed, vector_id, "code"), (n, self._compute, self._program.longest_piece)
        self.worker = FeedbackEncoder(codec, feedback, *here, stream, comm.rank)
        self._payload: AllGatherPayload | TwoPassPayload
        if star:
            root = FeedbackEncoder(back, None, *here, stream, 0)
            self._payload = TwoPassPayload(self._program, self.worker, root, self._put)
        else:
            self._payload = AllGatherPayload(self._program, self.worker, self._put)

    @property
    def residual(self) -> NDArray[Any]:
        """What the next step is given back: [n], or [0] without feedback."""
        return self.worker.residual

    def _exchange(self, values: NDArray[Any], traffic: Traffic) -> None:
        self._payload.begin(values, self.step)
        fixed = isinstance(self._payload, AllGatherPayload) and self._payload.fixed
        requests = self._requests if fixed else None
        self.comm.execute(self._program, self._payload, self._tag, traffic, self._tell, requests)
        self._payload.values = np.empty(0)  # the caller's is his to free

    def _workers(self) -> tuple[FeedbackEncoder, ...]:
        return (self.worker,)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"residual": self.residual}


class GatheredOptions:
    """Base of the options of such methods; a class adds its fields, and says what codec and feedback these mean.

    Attributes
    ----------
    seed : int
        Equal on all ranks.
    """

    synchronize: ClassVar[Synchronize] = "gradients"
    uses_tensor_lengths: ClassVar[bool] = False
    aggregator: ClassVar[type[AllGatherAggregator]] = AllGatherAggregator
    seed: int = 0

    def codec_for(self, dtype: str) -> Codec:
        """Of vectors of a type."""
        raise NotImplementedError

    @property
    def feedback(self) -> Feedback | None:
        """None: nothing is kept."""
        return None

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> AllGatherAggregator:
        """See `Algorithm.start`; tensor_lengths play no part."""
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return self.aggregator(self, comm, n, dtype, vector_id, self.codec_for(name), self.feedback, self.seed)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: the same bytes whatever a message's weight."""
        codec = self.codec_for(dtype)
        return MessageModel(codec.nbytes, piece_elements(codec, n, piece_bytes), codec.alignment, AllGather())
