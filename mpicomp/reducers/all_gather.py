"""All-gather of codes: every rank receives the codes of all ranks and adds their values in rank order.

A sum of codes is not a code, so codes cannot be reduced on the way. They travel piece by piece, once round the ring,
while later pieces are encoded and earlier ones summed; short ones travel with the ranks' reports. Over a star the
server receives the codes instead, adds their values and sends the mean back in full precision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Bytes, Testable, override
from collectives.execution.payload import MessageMemory, Payload
from collectives.execution.pipelined import execute
from collectives.execution.program import Program, gather_program, pieces
from collectives.progress.polling import done
from collectives.schedules.star import Star
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Parts, Reducer, Round, VectorSpec
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.codecs.base import Codec
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.feedback.codes import GatheredCodes, SharedScales
from mpicomp.feedback.error_feedback import ErrorRule, FeedbackEncoder
from mpicomp.feedback.payloads import Payloads, Results
from mpicomp.feedback.rounds import Work
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.piece_lengths import BRIEF_ELEMENTS, piece_elements
from mpicomp.reducers.two_pass import owned_codes
from mpicomp.spaces import space_at


def all_gather(
    comm: Communicator,
    spec: VectorSpec,
    codec: Codec,
    rule: ErrorRule | None,
    seed: int = 0,
    feedback: Callable[..., GatheredCodes] = GatheredCodes,
    scales: SharedScales | None = None,
) -> Parts:
    """Return feedback x codec x all-gather; over a star feedback x codec x two passes, the second in full precision.

    A method with a `feedback` class of its own is gathered round the ring over a star, too.

    Parameters
    ----------
    comm : Communicator
    spec : VectorSpec
    codec : Codec
    rule : ErrorRule, optional
        None: errors are lost.
    seed : int
        Seed of the codec's random words.
    feedback : callable
        Maker of the feedback; its arguments are those of `GatheredCodes`.
    scales : SharedScales, optional
        Scales of buckets that the ranks agree on before they encode.

    Returns
    -------
    Parts

    Examples
    --------
    >>> import mpicomp
    >>> from mpicomp.aggregator.algorithm import VectorSpec
    >>> from mpicomp.codecs import OneBit
    >>> from mpicomp.feedback.error_feedback import ErrorFeedback
    >>> from mpicomp.reducers.all_gather import all_gather
    >>> with mpicomp.Communicator() as comm:
    ...     parts = all_gather(comm, VectorSpec(100, "float32"), OneBit(), ErrorFeedback())
    >>> list(parts.feedback.residuals)
    ['residual']
    """
    stream = Stream(seed, spec.vector_id, "code")
    if isinstance(comm.topology, Star) and feedback is GatheredCodes:
        back = FullPrecision(spec.dtype)
        return owned_codes(comm, spec, codec, back, rule, None, (stream, stream), ("residual",), scales)
    longest, space = piece_elements(codec, spec.n, comm.routes.packed_piece_bytes()), space_at(spec.device)
    cuts = pieces(range(spec.n), longest, codec.alignment)
    program = gather_program(comm.rank, comm.size, cuts)
    about = spec.n, spec.compute.type, program.longest_piece, stream
    encoder = FeedbackEncoder(space, codec, rule, *about, comm.rank, ranks=comm.size)
    payloads = Payloads(space, codec, [len(cut) for cut in program.pieces])
    results = Results(space, spec.dtype, program.longest_piece)
    codes = feedback(space, {"residual": encoder}, cuts, payloads, results)
    if scales is not None:
        codes.share_scales(scales)
    n_reports = codes.n_reports if codes.reports_when == "beside" else None
    return Parts(codes, AllGatherReducer(comm, program, payloads, len(cuts), n_reports))


def gather_at_once(
    call: VectorCall,
    channel: SideChannel,
    payload: Payload,
    rank: int,
    codes: Sequence[Bytes],
    encoded: Callable[[], None],
) -> Iterator[bool]:
    """Exchange the codes of all ranks behind their reports, in one message to each rank.

    Parameters
    ----------
    call : VectorCall
    channel : SideChannel
        Its tails have the length of a rank's codes.
    payload : Payload
        Its pieces are the ranks' codes.
    rank : int
    codes : sequence of uint8 arrays
        Memory of each rank's codes; none for vectors without elements.
    encoded : callable
        Sends this rank's reports.
    """
    traffic = call.traffic
    clock = traffic.clock
    start = clock()
    if codes:
        yield from done(call, payload.encode(rank))
        channel.tail[:] = codes[rank]
    encoded()
    sent = clock()
    yield from channel.collect(call, traffic)
    arrived = clock()
    for origin, memory in enumerate(codes):
        if origin != rank:
            memory[:] = channel.tails[origin]
        yield from done(call, payload.finish(origin))
    end = clock()
    traffic.seconds_encoding += sent - start
    traffic.seconds_waiting += arrived - sent
    traffic.seconds_decoding += end - arrived
    traffic.seconds_total += end - start


class AllGatherReducer(Reducer):
    """Reducer that sends every rank's payloads once round the ring; it is also the `Payload` of its program.

    Parameters
    ----------
    comm : Communicator
    program : Program
        Program of `gather_program`: pieces of all ranks, rank by rank.
    payloads : Payloads
        Payloads of the program's pieces.
    n_cuts : int
        Number of pieces of one vector.
    n_reports : int or None
        Number of reports that short payloads travel with; None: they travel alone.
    """

    receive_buffers = 0
    encode: Work

    def __init__(
        self, comm: Communicator, program: Program, payloads: Payloads, n_cuts: int, n_reports: int | None
    ) -> None:
        self.program, self._payloads = program, payloads
        self._rank, self._size, self._n_cuts = comm.rank, comm.size, n_cuts
        self._tag, self._varies = comm.fixed_tag(), payloads.varies
        self._requests = None if self._varies else comm.users.persistent(self)
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in payloads.host]
        self.brief = not program.pieces or program.pieces[n_cuts - 1].stop <= BRIEF_ELEMENTS
        self._missing, self._counting = [0] * n_cuts, threading.Lock()
        self.at_once = not self._varies and n_cuts == 1 and self.brief and comm.routes.gathers(payloads.host[0].nbytes)
        self.at_once = self.at_once and n_reports is not None
        if n_reports is not None and self.at_once:
            self.side_channel = SideChannel(comm, n_reports, payloads.host[0].nbytes)

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        self.encode, self._decode = work.encode, work.decode
        self._missing = [self._size] * self._n_cuts
        try:
            if self.at_once:
                assert self.side_channel is not None
                codes = self._payloads.host
                yield from gather_at_once(call, self.side_channel, self, self._rank, codes, encoded)
            else:
                yield from execute(call, self.program, self, self._tag, call.traffic, encoded, self._requests)
        finally:
            # they would keep the feedback alive in a cycle
            del self.encode, self._decode

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return the payload to send; without its unused end if its length varies."""
        if self._varies:
            return [self._payloads.host[piece], self._payloads.count_sent(piece), MPI.BYTE]
        return self._messages[piece]

    def replacing(self, piece: int, weight: int) -> MessageMemory:
        """Return the memory for the payload of another rank."""
        return self._messages[piece]

    def finish(self, piece: int) -> Testable | None:
        """Decode a piece once the payloads of all ranks are there."""
        rank, k = divmod(piece, self._n_cuts)
        if rank != self._rank:
            self._payloads.deliver(piece)
        with self._counting:
            self._missing[k] -= 1
            complete = not self._missing[k]
        return self._decode(k) if complete else None
