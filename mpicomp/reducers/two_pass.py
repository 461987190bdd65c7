"""Two-pass compression: ranks send codes to the owner of each shard, which sends a code of their mean to all.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send R(v);     d <- v - R(v)
    result:   R(v)

A shard's owner sums the ranks' codes in rank order, not in the order of arrival. A parameter server, which owns the
whole vector, and owners of parts therefore compute the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Bytes, override
from collectives.execution.payload import MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from collectives.schedules.plan import Topology, server_of
from collectives.schedules.star import Direct
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Parts, Reducer, Round, VectorSpec
from mpicomp.codecs.base import Codec
from mpicomp.feedback.codes import OwnedCodes, SharedScales
from mpicomp.feedback.error_feedback import ErrorRule, FeedbackEncoder
from mpicomp.feedback.payloads import Payloads, Results, buffers
from mpicomp.feedback.rounds import Work
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.piece_lengths import BRIEF_ELEMENTS, piece_elements
from mpicomp.spaces import HOST, space_at

MOST_BUFFERS = 8
ERRORS = "worker_error", "owner_error"


def route(comm: Communicator) -> Topology:
    """Return the way to owners: over the root of a star if that was chosen, else directly between ranks and owners."""
    topology = comm.topology
    return Direct() if isinstance(topology, str) or server_of(topology) is None else topology


def two_pass(
    comm: Communicator,
    spec: VectorSpec,
    codec: Codec,
    second: Codec,
    rule: ErrorRule | None,
    owners_rule: ErrorRule | None,
    seed: int = 0,
) -> Parts:
    """Return feedback x codec x two passes.

    codec, rule : codec and error rule from worker to owner. second, owners_rule : those from owner to worker.
    """
    streams = tuple(Stream(seed, spec.vector_id, f"code of {who}") for who in ("worker", "owner"))
    return owned_codes(comm, spec, codec, second, rule, owners_rule, streams, ERRORS)


def owned_codes(
    comm: Communicator,
    spec: VectorSpec,
    codec: Codec,
    second: Codec,
    rule: ErrorRule | None,
    owners_rule: ErrorRule | None,
    streams: tuple[Stream, ...],
    keys: tuple[str, ...],
    scales: SharedScales | None = None,
    feedback: Callable[..., OwnedCodes] = OwnedCodes,
) -> Parts:
    """Return the parts of `two_pass`, with given streams of worker and owner, and keys of errors in states.

    scales, feedback : as in `mpicomp.reducers.all_gather.all_gather`.
    """
    longest, space = piece_elements(codec, spec.n, comm.routes.packed_piece_bytes(), second), space_at(spec.device)
    program = comm.routes.program(route(comm), spec.n, codec.alignment, longest)
    here = spec.n, spec.compute.type, program.longest_piece
    worker = FeedbackEncoder(space, codec, rule, *here, streams[0], comm.rank, ranks=comm.size)
    # an owner sends the result itself, so its error is that of all ranks and includes the rounding to 16 bits
    applied = spec.dtype if spec.is_narrow and len(keys) == 2 and feedback is OwnedCodes else None
    owner = FeedbackEncoder(HOST, second, owners_rule, *here, streams[1], 0, applied, "owner")
    encoders = dict(zip(keys, (worker, owner), strict=False))
    lengths = [len(cut) for cut in program.pieces]
    mine, means = Payloads(space, codec, lengths), Payloads(space, second, lengths)
    reducer = TwoPassReducer(comm, program, mine, means)
    own = reducer.own if owners_rule is not None else None
    results = Results(space, spec.dtype, program.longest_piece)
    about = owner, means, reducer.sent, codec, comm.size, own
    codes = feedback(space, encoders, program.pieces, mine, results, *about)
    if scales is not None:
        codes.share_scales(scales)
    return Parts(codes, reducer)


class TwoPassReducer(Reducer):
    """Reducer that sends codes to owners and means back; the owner of a piece merges the codes of all ranks.

    It is also the payload of its program: a `collectives.execution.payload.MergedPayload`.

    Parameters
    ----------
    comm : Communicator
    program : Program
    mine, means : Payloads
        Payloads of the program's pieces: this rank's codes, and the owners' codes.

    Attributes
    ----------
    own : range
        Elements that this rank owns.
    sent : dict of int to list of uint8 arrays
        Payloads of all ranks, by owned pieces.
    """

    encode: Work
    finish: Work
    _complete: Callable[[int], None]

    def __init__(self, comm: Communicator, program: Program, mine: Payloads, means: Payloads) -> None:
        self.program, self._mine, self._means = program, mine, means
        self._tag, self._size = comm.fixed_tag(), comm.size
        cuts = program.pieces
        self.brief = not cuts or cuts[-1].stop <= BRIEF_ELEMENTS
        merging = [any(message.held_weight for message in chain) for chain in program.chains]
        owned = [piece for piece, merges in enumerate(merging) if merges or self._size == 1]
        self.own = range(cuts[owned[0]].start, cuts[owned[-1]].stop) if owned else range(0)
        self.receive_buffers = min(MOST_BUFFERS, self._size - 1) if any(merging) else 0
        longest = max((payload.size for payload in mine.host), default=0)
        self._buffers = buffers([longest] * self.receive_buffers)
        own, ranks = mine.host, range(self._size)
        self.sent: dict[int, list[Bytes]] = {
            piece: [own[piece] if rank == comm.rank else np.empty_like(own[piece]) for rank in ranks] for piece in owned
        }
        self._missing, self._counting = [0] * len(cuts), threading.Lock()

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        assert work.complete is not None
        self.encode, self.finish, self._complete = work.encode, work.decode, work.complete
        self._missing = [self._size - 1] * len(self._missing)
        try:
            yield from execute(call, self.program, self, self._tag, call.traffic, encoded)
        finally:
            # they would keep the feedback alive in a cycle
            del self.encode, self.finish, self._complete

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return this rank's code of a piece, or the owner's code of the mean."""
        payloads = self._means if weight > 1 else self._mine
        return [payloads.host[piece], payloads.count_sent(piece), MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> MessageMemory:
        """Return the memory for the owner's code of the mean."""
        payload = self._means.host[piece]
        return [payload, payload.nbytes, MPI.BYTE]

    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        """Return the memory for the code of another rank."""
        nbytes = self._mine.host[piece].size
        return [self._buffers[buffer][:nbytes], nbytes, MPI.BYTE]

    def prepare(self, message: Message, buffer: int) -> None:
        """Do nothing: a merge needs no random words."""

    def merge(self, message: Message, buffer: int) -> None:
        """Store a payload until those of all ranks are there."""
        piece = message.piece
        incoming = self.sent[piece][message.peer]
        incoming[:] = self._buffers[buffer][: incoming.size]
        with self._counting:
            self._missing[piece] -= 1
            complete = not self._missing[piece]
        if complete:
            self._complete(piece)
