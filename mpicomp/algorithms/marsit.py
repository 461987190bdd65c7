"""Marsit: one bit per element on every hop of a multi-hop all-reduce, with compensation and full-precision rounds.

Per step, with u this rank's update, c its residual, s the global step, q = sgn(w):

    w = u + c
    every K steps:   g = mean(w),                      c = 0
    else:            g = s * one_bit_allreduce(q),
                     c = w - g                         residual="paper" (Algorithm 1 of the paper)
                     c = clip(w - s q, -tau s, tau s)  residual="own", the default

The one-bit all-reduce gives each element the sign of one uniformly random rank.

Departures from the paper: residual "own" (the paper's residual accumulates the ranks' disagreement without a bound, and
a full-precision round releases it in one jump); s follows the mean magnitude of the updates instead of being constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from collectives import Communicator
from collectives.annotations import override
from collectives.caller_warning import warn_caller
from collectives.execution.staged import until_queued
from collectives.progress.polling import done
from mpicomp.aggregator.algorithm import Algorithm, Driver, MessageModel, Parts, Synchronize, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.registration import Advised, Grade, Learned, method
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.step import StepDriver
from mpicomp.codecs.options import choice, flag, integer, number
from mpicomp.codecs.shared_selection import SharedSelection
from mpicomp.feedback.scale_groups import padded_lengths
from mpicomp.feedback.sign_residual import SignResidual
from mpicomp.feedback.step_size import GAMMA, SignRule
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.full_precision_mean import FullPrecisionMean
from mpicomp.reducers.shared_selection import SelectionGather, selection_model
from mpicomp.reducers.sign_merge import OneBitReducer, message_model, sign_reducer
from mpicomp.spaces import space_at

OWN_WARNING, PAPER_WARNING, WARN_AFTER = 0.3, 5.0, 100
MOST_COPIED = 1 << 14  # elements of a residual whose copy takes less time than a round of messages


_LEARNED = Learned(Grade.PROMISING, "ended within 0.73 points of dense in each of 15 trainings, behind it in others")
_WINNERS = Learned(Grade.PROMISING, "ended where marsit does in 15 trainings, within the spread of the seeds")


@method(
    "marsit",
    forms=(
        {"full_precision_every": 2},
        {"full_precision_every": None},
        {"full_precision_every": 4, "residual": "paper"},
        {"full_precision_every": None, "residual": "paper", "global_step": 0.5},
        {"full_precision_every": 3, "compensation": False},
        {"full_precision_every": None, "compensation": False, "global_step": 1.0},
        {"full_precision_every": 3, "winners": 2},
    ),
    advised={
        "marsit-100": Advised({"full_precision_every": 100}, _LEARNED),
        "marsit": Advised({"full_precision_every": None}, _LEARNED),
        "marsit-1-winner": Advised({"full_precision_every": None, "winners": 1}, _WINNERS),
        "marsit-2-winners": Advised({"full_precision_every": None, "winners": 2}, _WINNERS),
    },
)
@dataclass(frozen=True)
class Marsit(Algorithm):
    """Options of Marsit: one bit per element on every hop, a residual, and steps in full precision now and then.

    Parameters
    ----------
    full_precision_every : int or None
        K: steps 0, K, 2K, ... are dense; None: no step is dense.
    global_step : float or "auto"
        s. "auto": gamma times the running mean of |u| over ranks and elements of a tensor.
    residual : "own" or "paper"
        Error that is carried over: "own", the error of this rank's own sign, or "paper", the paper's rule.
    clip : float
        tau, the bound of residual "own" in units of s; math.inf does not clip.
    compensation : bool
        False: no residual, the stateless one-bit all-reduce.
    gamma : float or "auto"
        Factor of the automatic global step. "auto" starts at 4 and adapts to the fraction of clipped elements.
    nonfinite : "raise" or "skip"
        Treatment of NaN or infinity on any rank. "raise": an error on every rank, after which a residual must be
        restored or reset. "skip": a result of zeros and unchanged residuals, at the cost of a pass over the vector.
    seed : int
        Seed of the random words; equal on all ranks.
    winners : int or None
        None: signs are merged on every hop. 1 or 2: all ranks draw the same one or two winners of each element, and
        only the winners' signs travel. Requires residual "own" or no residual.
    transactional : bool
        Keep the old residual in a second buffer of n elements, so that a step that fails, because of NaN or a dead
        rank, leaves residual and scales unchanged.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Wu, He, Guo, Qu, Wang, Zhuang, Zhang, "Sign bit is enough: a learning synchronization framework for multi-hop
    all-reduce with ultimate compression", DAC 2022 (arXiv 2204.06787), Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def train(comm):
    ...     updates = np.random.default_rng(comm.rank).normal(size=(2, 64_000)).astype(np.float32)
    ...     marsit, sent = mpicomp.Marsit(full_precision_every=100).start(comm, 64_000), []
    ...     for update in updates:
    ...         mean = marsit.aggregate(update)  # subtract it from the parameters, on every rank
    ...         sent.append(marsit.traffic.last.bytes_sent)
    ...     return sent
    >>> dense, one_bit = mpicomp.run_local(4, train, topology="ring")[0]
    >>> dense > 30 * one_bit
    True
    """

    full_precision_every: int | None = 100
    global_step: float | Literal["auto"] = "auto"
    residual: Literal["own", "paper"] = "own"
    clip: float = 1.0
    compensation: bool = True
    gamma: float | Literal["auto"] = GAMMA
    nonfinite: Literal["raise", "skip"] = "raise"
    seed: int = 0
    winners: Literal[1, 2] | None = None
    transactional: bool = False

    synchronize: ClassVar[Synchronize] = "updates"
    symbols: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"k": "full_precision_every", "s": "global_step", "tau": "clip"}
    )

    def __post_init__(self) -> None:
        integer(self, "full_precision_every", 1, also=(None,))
        for name in ("global_step", "gamma"):
            number(self, name, "a positive, finite number", lambda value: 0 < value < math.inf, also=("auto",))
        choice(self, "residual", ("own", "paper"))
        number(self, "clip", "positive", lambda value: value > 0)
        flag(self, "compensation")
        choice(self, "nonfinite", ("raise", "skip"))
        integer(self, "seed")
        integer(self, "winners", 1, 2, also=(None,))
        if self.winners is not None and self.residual == "paper":
            raise ValueError(f"winners must be None with residual='paper', not {self.winners!r}")
        flag(self, "transactional")

    uses_tensor_lengths: ClassVar[bool] = True
    """True: each tensor has a global step of its own."""

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return True

    @override
    def is_dense(self, step: int) -> bool:
        return self.full_precision_every is not None and step % self.full_precision_every == 0

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Sign residual x signs x merging on every hop; every K steps the exact mean."""
        lengths, padded = padded_lengths(spec.tensor_lengths, spec.n)
        kept = self.residual if self.compensation else None
        # a step that is made again among survivors begins from the residual of before
        keeps = self.transactional or comm.repeats_calls
        rule = SignRule(self.global_step, kept, self.clip, self.gamma, keeps)
        space, reports = space_at(spec.device), 1 + lengths.size
        reducer: OneBitReducer
        if self.winners is None:
            reducer = sign_reducer(comm, spec.n, Stream(self.seed, spec.vector_id, "merge"), reports, space)
        else:
            stream, kind = Stream(self.seed, spec.vector_id, "selection"), "cpu" if spec.device == "cpu" else "cuda"
            selection = SharedSelection(comm.size, self.winners).bind(kind, stream)
            reducer = SelectionGather(comm, spec.n, selection, reports, space)
        votes = reducer.pieces, reducer.bits, reducer.second
        feedback = SignResidual(space, rule, spec.n, spec.dtype, comm.size, lengths, padded, *votes)
        dense = None if self.full_precision_every is None else FullPrecisionMean(comm, spec)
        return Parts(feedback, reducer, dense)

    @override
    def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
        parts = self.parts(comm, spec)
        return parts, MarsitDriver(self, comm, parts)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        if self.winners is None:
            return message_model(n, piece_bytes)
        return selection_model(n, ranks, self.winners, piece_bytes)


class MarsitDriver(StepDriver):
    """Steps of Marsit: one-bit or in full precision, and those that are skipped."""

    skips_empty = False
    feedback: SignResidual
    reducer: OneBitReducer

    def __init__(self, options: Marsit, comm: Communicator, parts: Parts) -> None:
        super().__init__(comm, parts, options.is_dense)
        self._options, self._rank = options, comm.rank
        self._flag = SideChannel(comm, 0, tail_bytes=1) if options.nonfinite == "skip" else None
        self._warned = False
        # a residual that is written before the ranks have compared the call must be copied
        pieces = self.reducer.pieces
        elements = pieces[-1].stop if pieces else 0
        self.can_compare = self.can_compare and self._flag is None and elements <= MOST_COPIED

    @override
    def reads_pieces(self, step: int) -> bool:
        return self._flag is None and super().reads_pieces(step)

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        return super().steps(call) if self._flag is None else self._skipping(call)

    def _skipping(self, call: VectorCall) -> Iterator[bool]:
        """Make a step unless a rank has NaN or infinity: then the result is 0, and no residual changes."""
        assert self._flag is not None
        yield from done(call, self.feedback.look(call.values, self._flag.tail))
        yield from self._flag.swap(call, call.traffic)
        if any(tail[0] for tail in self._flag.tails):
            self.feedback.skipped += 1
            yield from until_queued(call, self.feedback.clear(call.out))
        else:
            yield from super().steps(call)

    @override
    def end_decoding(self, call: VectorCall) -> None:
        self.feedback.end_decoding(call)
        if call.step >= WARN_AFTER - 1 and not self._warned and self.feedback.residual is not None:
            self._warn(call.step)

    @override
    def in_full_precision(self, call: VectorCall) -> Iterator[bool]:
        assert self.dense is not None
        feedback, mean = self.feedback, self.dense.mean
        self.channel.compare_with(None)  # also after a step that has failed before its reports
        feedback.begin(call)
        total = call.out if call.wide is None else call.wide
        yield from done(call, feedback.add_and_clear(total))
        self.report()
        yield from self.collect(call)
        yield from mean.steps(call, total, call.out, self.reducer.scratch)
        if not (yield from mean.all_finite(call, call.out)):
            raise call.non_finite(())

    def _warn(self, step: int) -> None:
        """Warn once if much of the residual is clipped, or if it diverges."""
        taken, feedback = step + 1, self.feedback
        if self._options.residual == "own":
            if feedback.clipped_fraction > OWN_WARNING and self._rank == 0:
                self._warned = True
                warn_caller(
                    f"{feedback.clipped_fraction:.0%} of the residual is clipped at step {step}: gamma is too small"
                )
        elif taken % WARN_AFTER == 0:  # the residual is longest just before a full-precision round
            swing = feedback.swing()
            if swing > PAPER_WARNING:
                self._warned = True
                warn_caller(
                    f"rank {self._rank}: the residual is {swing:.1f} times the global step at step {step}: "
                    "divergence is ahead; use residual='own'"
                )
