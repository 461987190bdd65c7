"""Majority vote: the sign that most ranks gave (signSGD with majority vote).

    k = number of ranks with sgn(g) = +1;   result = +1 where k > M/2, -1 where k < M/2, a fair coin where k = M/2

Counts travel in the reduce phase, the majority's signs, one bit per element, in the gather phase. The result is +-1:
the caller scales it. There is no residual, so zeros alternate with the parity of step + index, or a coordinate whose
gradient is always zero would drift for ever.

References: J. Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR
(2019), over a parameter server; under multi-hop all-reduce: Marsit (arXiv 2204.06787), sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from collectives import Communicator
from collectives.execution.program import Program
from collectives.memory import narrow
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.base import MessageModel, Synchronize
from mpicomp.codecs.options import integer
from mpicomp.codecs.sign import UNSIGNED, scratch
from mpicomp.codecs.vote_counts import Counts, draw_coins, planes_of
from mpicomp.kernels.cpu.sign import pack, unpack
from mpicomp.kernels.cpu.vote_counts import majority
from mpicomp.kernels.streams import GROUP, Stream
from mpicomp.reducers.sign_merge import Encode, SideChannel
from mpicomp.reducers.vote_count import STREAMING_ELEMENTS, VoteCountAggregator, VoteCountPayload, Words, counts_wire


@dataclass(frozen=True)
class MajorityVote:
    """Options of the majority vote.

    Parameters
    ----------
    seed : int
        Of the coins that decide ties; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    seed: int = 0

    synchronize: ClassVar[Synchronize] = "gradients"
    uses_tensor_lengths: ClassVar[bool] = False

    def __post_init__(self) -> None:
        integer(self, "seed")

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> MajorityVoteAggregator:
        """See `Algorithm.start`; tensor_lengths mean nothing here."""
        return MajorityVoteAggregator(self, comm, n, dtype, vector_id)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: counts, and one bit per element once they are complete."""
        counts = Counts()
        return counts_wire(
            n, ranks, piece_bytes, lambda elements, weight: counts.nbytes(elements, 1 if weight == ranks else weight)
        )


class MajorityVoteAggregator(VoteCountAggregator):
    """Keeps nothing but the step counter."""

    def __init__(
        self, options: MajorityVote, comm: Communicator, n: int, dtype: DTypeLike | str, vector_id: int
    ) -> None:
        super().__init__(options, comm, n, dtype, vector_id, None, self._make_payload)
        kind = self._compute.type
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        self._schedule, self._scratch = Stream(options.seed, vector_id, "tie").schedule(), scratch()
        self._coins = np.empty(8 * -(-self._program.longest_piece // GROUP), np.uint64) if comm.size % 2 == 0 else None
        self._bits_of_result = UNSIGNED[self._result_dtype.itemsize]
        ones = np.zeros(2, self._result_dtype)
        if self._wide is None:
            ones[:] = 1, -1
        else:
            narrow(np.array([1, -1], np.float32), self.dtype, ones)
        self._plus, self._minus = ones.view(self._bits_of_result)
        self._side_channel = SideChannel(comm, 1)
        self._finite = True

    def _make_payload(self, program: Program, encode: Encode, finish: Encode) -> VoteCountPayload:
        return VoteCountPayload(program, encode, finish, self._decide if self.comm.size > 1 else None)

    def _count(self) -> None:
        self._finite = True
        self._travel(self._encoded)
        self._side_channel.collect(self._traffic)
        bad = tuple(int(rank) for rank in np.flatnonzero(self._side_channel.everyones[:, 0]))
        if bad:
            raise nonfinite.error(self.comm, bad, f"vector {self.vector_id}, step {self.step}")

    def _encode(self, piece: int) -> None:
        cut = self._program.pieces[piece]
        signs = self._payload.counts[piece][: self._payload.words[piece]]
        self._finite &= bool(pack(self._values[cut.start : cut.stop], signs, self.step % 2 == 0, *self._constants))

    def _encoded(self) -> None:
        """Tell the others whether this rank's vector is finite, while counts are still travelling."""
        self._side_channel.mine[0] = not self._finite
        self._side_channel.start()

    def _decide(self, first: int, counts: Words, words: int) -> None:
        """Whoever completes a piece decides it; the coins know of no rank, so it does not matter who does."""
        coins = self._coins
        if coins is not None:
            coins = coins[: 8 * -(-64 * words // GROUP)]
            draw_coins(self._schedule, first, self.step, self._scratch, coins)
        size = self.comm.size
        majority(counts, planes_of(size), words, size // 2, coins, counts)

    def _finish(self, piece: int) -> None:
        cut, words = self._program.pieces[piece], self._payload.words[piece]
        out = self._out[cut.start : cut.stop].view(self._bits_of_result)
        streaming = self.n >= STREAMING_ELEMENTS and self._out.ctypes.data % 32 == 0
        unpack(self._payload.counts[piece][:words], self._plus, self._minus, streaming, out)
