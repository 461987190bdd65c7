"""SSDM: unbiased random signs, counted. Stochastic sign descent, with momentum if you like.

Per step and segment, with g this rank's gradient:

    x = g, or with momentum m <- beta m + (1 - beta) g, x = m
    sign +1 with probability 1/2 + x_i / (2 N), else -1;   k = number of ranks with sign +1
    scale="norm": N is the largest of the ranks' ||x||_2,   result = N (2 k - M) / M, unbiased
    scale="none": N is this rank's own ||x||_2,             result = (2 k - M) / M, the caller scales

An element's sign is hardly better than a coin, as N is some sqrt(D) times the size of an element: the variance of the
unbiased result is about D N^2 / M in all.

References: M. Safaryan and P. Richtarik, "Stochastic sign descent methods: new algorithms and better theory", ICML
(2021); under multi-hop all-reduce: Marsit (arXiv 2204.06787), sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.base import MessageModel, StateKind, Synchronize, VectorAggregator
from mpicomp.codecs.elias_counts import Elias
from mpicomp.codecs.options import choice, integer, number
from mpicomp.codecs.vote_counts import Counts
from mpicomp.kernels.cpu.sign import BLOCK
from mpicomp.kernels.cpu.ssdm import squares, stochastic_signs
from mpicomp.kernels.cpu.vote_counts import segment_totals
from mpicomp.kernels.streams import Stream, source
from mpicomp.reducers.scaled import ScaledAggregator
from mpicomp.reducers.sign_merge import SideChannel
from mpicomp.reducers.vote_count import VoteCountPayload, Words, counts_wire
from mpicomp.reducers.vote_count_elias import EliasPayload


@dataclass(frozen=True)
class SSDM:
    """Options of SSDM.

    Parameters
    ----------
    momentum : float
        beta, at least 0 and below 1; 0: none.
    scale : "none" or "norm"
        What signs stand for: nothing but themselves, by each rank's own norm, or the gradient, by the largest norm.
    coding : "fixed" or "elias"
        Of the counts that travel: as many bits as the largest takes, or the shortest of that and Elias' codes.
    seed : int
        Of the random words; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    momentum: float = 0.0
    scale: Literal["none", "norm"] = "none"
    coding: Literal["fixed", "elias"] = "fixed"
    seed: int = 0

    synchronize: ClassVar[Synchronize] = "gradients"
    uses_tensor_lengths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number(self, "momentum", "at least 0 and below 1", lambda beta: 0 <= beta < 1)
        choice(self, "scale", ("none", "norm"))
        choice(self, "coding", ("fixed", "elias"))
        integer(self, "seed")

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> SSDMAggregator:
        """See `Algorithm.start`."""
        return SSDMAggregator(self, comm, n, dtype, vector_id, tensor_lengths)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`; with Elias' codes the most there can be."""
        return counts_wire(n, ranks, piece_bytes, (Elias() if self.coding == "elias" else Counts()).nbytes)


class Part:
    """A stretch's elements in one piece, or in one block where they begin within it; its sums and its signs."""

    __slots__ = ("bits", "elements", "stretch", "sums")

    def __init__(self, elements: slice, stretch: int, sums: NDArray[np.float64], bits: Words) -> None:
        self.elements, self.stretch, self.sums, self.bits = elements, stretch, sums, bits


class SSDMAggregator(ScaledAggregator):
    """Step counter and, if there is any, momentum.

    The ranks tell each other their norms before they draw signs, so that a step that meets NaN on any rank changes
    nothing.
    """

    state_kinds: ClassVar[dict[str, StateKind]] = {**VectorAggregator.state_kinds, "momentum": "mean"}

    def __init__(
        self,
        options: SSDM,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
    ) -> None:
        elias = options.coding == "elias"
        super().__init__(
            options, comm, n, dtype, vector_id, tensor_lengths, EliasPayload if elias else VoteCountPayload
        )
        if elias:
            self._requests = None  # messages of other lengths at every step
        self.options = options
        kind = self._compute.type
        self.momentum = np.zeros(n, kind) if options.momentum else None
        self._beta, self._gain = kind(options.momentum), kind(1 - options.momentum)
        self._schedule = Stream(options.seed, vector_id, "stochastic sign").schedule()
        self._source = source(comm.rank)
        self._norms = np.zeros(self.factors.size)  # N of each segment
        self._side_channel = SideChannel(comm, self.factors.size)
        self._parts = [list(self._cut(piece)) for piece in range(len(self._program.pieces))]

    def _cut(self, piece: int) -> Iterator[Part]:
        cut, where, counts = self._program.pieces[piece], self.stretches, self._payload.counts[piece]
        for stretch in range(*self._spans[piece]):
            begin = int(where.starts[stretch])
            start, stop = max(begin, cut.start), min(int(where.stops[stretch]), cut.stop)
            while start < stop:
                end = stop if start % BLOCK == 0 else min(stop, start - start % BLOCK + BLOCK)
                block = int(where.firsts[stretch]) + start // BLOCK - begin // BLOCK
                sums = self._sums[block : block + -(-(end - start) // BLOCK)]
                bits = counts[(start - cut.start) // 64 : -(-(end - cut.start) // 64)]
                yield Part(slice(start, end), stretch, sums, bits)
                start = end

    def _count(self) -> None:
        start = self._traffic.clock()
        for part in chain.from_iterable(self._parts):
            squares(self._values[part.elements], self._momentum_of(part.elements), self._beta, self._gain, part.sums)
        mine = self._side_channel.mine
        finite = segment_totals(self._sums, self.stretches.firsts, mine)
        np.sqrt(mine, out=mine)
        if not finite:
            self._measure_large(mine)
        # rounded once; a norm beyond the largest number becomes that: it is no less than any element
        mine[:] = np.where(np.isfinite(mine), np.minimum(mine, np.finfo(self._compute).max), mine).astype(self._compute)
        known = self._traffic.clock()
        self._side_channel.start()
        self._side_channel.collect(self._traffic)
        self._traffic.seconds_encoding += known - start
        self._traffic.seconds_waiting += self._traffic.clock() - known
        self._traffic.seconds_total += self._traffic.clock() - start
        self._set_scales(self._side_channel.everyones)
        self._travel()

    def _measure_large(self, norms: NDArray[np.float64]) -> None:
        """Norms of float64 stretches whose squares overflow, by dividing by their largest magnitudes first."""
        for stretch in np.flatnonzero(~np.isfinite(norms)):
            part = slice(int(self.stretches.starts[stretch]), int(self.stretches.stops[stretch]))
            x, momentum = self._values[part], self._momentum_of(part)
            with np.errstate(over="ignore", invalid="ignore"):
                if momentum is not None:
                    x = self._beta * momentum + self._gain * x
                largest = np.abs(x).max()
                if np.isfinite(largest):
                    norms[stretch] = min(largest * np.linalg.norm(x / largest), np.finfo(np.float64).max)
        if not np.isfinite(norms).all():
            nonfinite.tell_why(norms, self._values)

    def _set_scales(self, norms: NDArray[np.float64]) -> None:
        """N and the factors of this step; raise if they are not finite."""
        where = f"vector {self.vector_id}, step {self.step}"
        if not np.isfinite(norms).all():
            raise nonfinite.error(self.comm, nonfinite.bad_ranks(norms), where)
        longest, size = norms.max(axis=0), self.comm.size
        if self.options.scale == "none":
            self._norms[:] = norms[self.comm.rank]
            self.factors[:] = (longest > 0) / size
            return
        self._norms[:] = longest
        self.factors[:] = longest.astype(self._compute) / size
        if not self._representable():
            raise nonfinite.error(self.comm, (), f"the norm of {where}")

    def _momentum_of(self, elements: slice) -> NDArray[Any] | None:
        return None if self.momentum is None else self.momentum[elements]

    def _encode(self, piece: int) -> None:
        step = np.uint64(self.step & 0xFFFFFFFF)
        for part in self._parts[piece]:
            stochastic_signs(
                self._schedule, np.uint64(part.elements.start), step, self._source,
                self._values[part.elements], self._momentum_of(part.elements), self._beta, self._gain,
                self._norms[part.stretch], part.bits,
            )  # fmt: skip

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {} if self.momentum is None else {"momentum": self.momentum}
