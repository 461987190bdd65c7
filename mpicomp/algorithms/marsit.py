"""Marsit: one bit per element on every hop of a multi-hop all-reduce, with compensation and full-precision rounds.

Per step, with u this rank's update, c its residual, s the global step, q = sgn(w):

    w = u + c
    every K steps:   g = mean(w),                      c = 0
    else:            g = s * one_bit_allreduce(q),
                     c = w - g                         residual="paper" (Algorithm 1 of the paper)
                     c = clip(w - s q, -tau s, tau s)  residual="own", the default

The one-bit all-reduce gives each element the sign of one uniformly random rank.

Departures from the paper: residual "own" (the paper's residual holds the ranks' disagreement, which wanders unboundedly
and is released in one jump by a full-precision round); s is not a constant but follows the updates' mean magnitude.

Reference: Marsit: Sign Compression for Multi-hop All-reduce (arXiv 2204.06787), Algorithm 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.consistency.call_check import fingerprint
from collectives.memory import narrow, widen
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.base import MessageModel, StateKind, Synchronize, VectorAggregator
from mpicomp.codecs.options import choice, flag, integer, number
from mpicomp.codecs.scale_groups import Run, cut_runs, padded_lengths
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.kernels.cpu.sign import (
    add_and_clear,
    add_up,
    all_finite,
    encode,
    follow,
    magnitudes,
    pack,
    set_steps,
    subtract_result,
    unpack,
)
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.sign_merge import one_bit_exchange, wire

AVERAGE = 0.9  # of the magnitudes' running mean
GAMMA = 4.0
GAMMA_RATE, GAMMA_CLIPPED, GAMMA_RANGE = 0.2, 0.015, (0.25, 16.0)
STREAMING_ELEMENTS = 4 << 20  # results this long are written past the caches
OWN_WARNING, PAPER_WARNING, WARN_AFTER, SAMPLE = 0.3, 5.0, 100, 1 << 16


@dataclass(frozen=True)
class Marsit:
    """Options of Marsit.

    Parameters
    ----------
    full_precision_every : int or None
        K: steps 0, K, 2K, ... are dense; None: never.
    global_step : float or "auto"
        s. "auto": gamma times the running mean of |u|, over ranks and elements, per segment.
    residual : "own" or "paper"
        What is carried over: what this rank's own sign missed, or the literal rule.
    clip : float
        tau of residual "own": its bound in units of s; math.inf does not clip.
    compensation : bool
        False: no residual; the stateless one-bit all-reduce.
    gamma : float or "auto"
        Of the automatic step. "auto" starts at 4 and follows the fraction of residual elements that are clipped.
    nonfinite : "raise" or "skip"
        NaN or infinity on any rank: an error on every rank, after which a residual must be restored or reset; or,
        for one more pass over the vector, a result of zeros and untouched residuals.
    seed : int
        Of the random words; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    full_precision_every: int | None = 100
    global_step: float | Literal["auto"] = "auto"
    residual: Literal["own", "paper"] = "own"
    clip: float = 1.0
    compensation: bool = True
    gamma: float | Literal["auto"] = GAMMA
    nonfinite: Literal["raise", "skip"] = "raise"
    seed: int = 0

    synchronize: ClassVar[Synchronize] = "updates"
    uses_tensor_lengths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        integer(self, "full_precision_every", 1, also=(None,))
        for name in ("global_step", "gamma"):
            number(self, name, "a positive, finite number", lambda value: 0 < value < math.inf, also=("auto",))
        choice(self, "residual", ("own", "paper"))
        number(self, "clip", "positive", lambda value: value > 0)
        flag(self, "compensation")
        choice(self, "nonfinite", ("raise", "skip"))
        integer(self, "seed")

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> MarsitAggregator:
        """See `Algorithm.start`."""
        return MarsitAggregator(self, comm, n, dtype, vector_id, tensor_lengths)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: between full-precision rounds."""
        return wire(n, piece_bytes)


class Part:
    """A run of elements that share a scale, and where its bits, sums and residual are."""

    __slots__ = ("bits", "elements", "residual", "segment", "sums")

    def __init__(
        self, run: Run, bits: NDArray[np.uint64], sums: NDArray[np.float64], residual: NDArray[Any] | None
    ) -> None:
        self.elements, self.segment = run.elements, run.segment
        self.bits, self.sums = bits[run.words], sums[run.sums]
        self.residual = None if residual is None else residual[run.elements]


class MarsitAggregator(VectorAggregator):
    """Residual, running magnitudes and buffers for one vector.

    Attributes
    ----------
    residual : ndarray[n] or None
        With rule "paper" the last result may still be to be subtracted: `state_dict` gives the settled one.
    gamma : float
    skipped : int
        Steps skipped because a rank had NaN or infinity.
    clipped_fraction : float
        Of the residual's elements over all ranks, at the last step.
    """

    state_kinds: ClassVar[dict[str, StateKind]] = {
        **VectorAggregator.state_kinds,
        "gamma": "shared",
        "magnitudes": "shared",
        "residual": "mean",
    }
    state_nan = "magnitudes"  # of tensor_lengths not seen yet

    def __init__(
        self,
        options: Marsit,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
    ) -> None:
        super().__init__(options, comm, n, dtype, vector_id, tensor_lengths)
        self.options = options
        self._lengths, padded = padded_lengths(tensor_lengths, n)
        kind = self._compute.type
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        self._exchange = one_bit_exchange(
            comm,
            n,
            Stream(options.seed, vector_id, "merge"),
            self._tag,
            1 + self._lengths.size,  # clipped elements, then the sum of |u| per segment
            self._encode,
            self._finish,
        )
        self._bits = self._exchange.bits
        runs, self._firsts = cut_runs(self._exchange.pieces, padded)
        sums = np.zeros(runs[-1][-1].sums.stop if n else 0)
        self.residual = np.zeros(n, self._compute) if options.compensation else None
        self._sums = sums  # of |u|, block by block
        self._parts = [[Part(run, self._bits, sums, self.residual) for run in of_piece] for of_piece in runs]
        self._lazy = options.compensation and options.residual == "paper"
        self._clips = options.compensation and options.residual == "own"
        self._stateless = not options.compensation and options.global_step != "auto"
        self.gamma = GAMMA if options.gamma == "auto" else options.gamma
        self.skipped = 0
        self._magnitudes = np.full(self._lengths.size, np.nan)  # a of each segment; NaN: not seen yet
        self._pending = np.zeros(self._lengths.size, self._compute)  # s of the result not yet subtracted ("paper")
        self._spoiled = self._warned = False
        self._clipped = 0
        count = self._lengths.size
        self._steps, self._minus_steps, self._limits = (np.zeros(count, self._compute) for _ in range(3))
        if options.global_step != "auto" and not self._scale(np.full(count, float(options.global_step)), 1.0):
            raise ValueError(f"global_step={options.global_step} is beyond what {self._compute} holds")
        self._words = UNSIGNED[self._result_dtype.itemsize]
        if self._wide is None:
            self._positive, self._negative = self._steps.view(self._words), self._minus_steps.view(self._words)
        else:
            self._positive, self._negative = np.zeros(count, self._words), np.zeros(count, self._words)
        self._elements = max(1, int(self._lengths.sum()) * comm.size)
        self._counts = np.maximum(1.0, self._lengths * comm.size)
        self.clipped_fraction = 0.0
        self._values: NDArray[Any] = self._sums
        self._out: NDArray[Any] = self._sums

    # One step --------------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._spoiled:
            raise RuntimeError(
                "an earlier step met NaN or infinity and its residual is spoiled: restore it by load_state_dict, "
                "or start() anew"
            )

    def _prepare(self) -> None:
        if not self._in_full_precision():
            self._exchange.prepare(self.step)

    def _in_full_precision(self) -> bool:
        every = self.options.full_precision_every
        return every is not None and self.step % every == 0

    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        options = self.options
        self._values = values
        if options.nonfinite == "skip" and nonfinite.flags(self.comm, not all_finite(values), traffic):
            self.skipped += 1
            out[:] = 0
        elif self._in_full_precision():
            self._full_precision(out, traffic)
        else:
            self._one_bit(out, traffic)
        self._values = self._out = self._sums  # the caller's vectors are his to free

    def _one_bit(self, out: NDArray[Any], traffic: Traffic) -> None:
        self._set_steps(traffic)
        self._out = out.view(self._words)
        self._streaming = self.n >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0
        self._clipped = 0
        self._exchange.run(self.step, traffic, self._encoded)
        self._collect(traffic)
        if self.options.residual == "paper":
            self._pending[:] = self._steps
        if self.options.gamma == "auto" and self._clips:
            low, high = GAMMA_RANGE
            change = math.exp(GAMMA_RATE * (self.clipped_fraction - GAMMA_CLIPPED))
            self.gamma = min(high, max(low, self.gamma * change))
        self._warn()

    def _full_precision(self, out: NDArray[Any], traffic: Traffic) -> None:
        total = self._wide if self._wide is not None else out
        for part in self._every_part():
            previous = self._pending[part.segment] if self._lazy else None
            u, sum_ = self._values[part.elements], total[part.elements]
            add_and_clear(u, part.residual, part.bits, previous, sum_, part.sums)
        self._pending[:] = 0
        self._clipped = 0
        self._encoded()
        self._collect(traffic)
        self.comm.dense(total, self.dtype, True, out, traffic, spare=self._exchange.spare)
        if not nonfinite.all_finite_result(out, self.dtype):
            self._spoiled = self.residual is not None
            raise nonfinite.error(self.comm, (), f"vector {self.vector_id}, step {self.step}")

    def _every_part(self) -> Iterator[Part]:
        return chain.from_iterable(self._parts)

    def _encode(self, piece: int) -> None:
        zero, tiny = self._constants
        odd_positive = self.step % 2 == 0
        for part in self._parts[piece]:
            u, bits, sums, segment = self._values[part.elements], part.bits, part.sums, part.segment
            if self._stateless:
                sums[:] = 0.0 if pack(u, bits, odd_positive, zero, tiny) else np.nan
                continue
            step, limit = self._steps[segment], self._limits[segment]
            previous = self._pending[segment] if self._lazy else None
            self._clipped += encode(u, part.residual, bits, step, limit, previous, odd_positive, zero, tiny, sums)

    def _finish(self, piece: int) -> None:
        for part in self._parts[piece]:
            positive, negative = self._positive[part.segment], self._negative[part.segment]
            unpack(part.bits, positive, negative, self._streaming, self._out[part.elements])

    # What the ranks tell each other beside the bits ------------------------------------------------------------------

    def _encoded(self) -> None:
        """All of this rank's sums are there: send them while the bits are still travelling."""
        side_channel = self._exchange.side_channel
        if not add_up(self._sums, self._firsts, self._clipped, side_channel.mine):
            nonfinite.tell_why(side_channel.mine, self._values)
        side_channel.start()

    def _collect(self, traffic: Traffic) -> None:
        """Take in the ranks' sums, in rank order; raise if one of them is not finite."""
        side_channel = self._exchange.side_channel
        side_channel.collect(traffic)
        clipped = follow(side_channel.everyones, self._counts, AVERAGE, self._magnitudes)
        if math.isnan(clipped):
            self._spoiled = self.residual is not None
            bad = nonfinite.bad_ranks(side_channel.everyones)
            raise nonfinite.error(self.comm, bad, f"vector {self.vector_id}, step {self.step}")
        self.clipped_fraction = clipped / self._elements

    def _set_steps(self, traffic: Traffic) -> None:
        """s of each segment for this step; the very first one asks for the magnitudes beforehand."""
        finite = True
        if self.options.global_step == "auto":
            if self._magnitudes[0] != self._magnitudes[0]:  # NaN
                for part in self._every_part():
                    magnitudes(self._values[part.elements], part.sums)
                self._encoded()
                self._collect(traffic)
            finite = self._scale(self._magnitudes, self.gamma)
        if self._wide is not None:
            narrow(self._steps, self.dtype, self._positive.view(self._result_dtype))
            narrow(self._minus_steps, self.dtype, self._negative.view(self._result_dtype))
            # the residual is what the result misses, so it must see s, and limits, as rounded there
            widen(self._positive.view(self._result_dtype), self.dtype, self._steps)
            finite = self._scale(self._steps.astype(np.float64), 1.0)
        if not finite:
            self._magnitudes[:] = np.nan  # the next step measures anew, or it would meet the same mean for ever
            raise nonfinite.error(self.comm, (), f"the global step of vector {self.vector_id}, step {self.step}")

    def _scale(self, magnitudes: NDArray[np.float64], gamma: float) -> bool:
        finite = set_steps(magnitudes, gamma, self.options.clip, self._steps, self._minus_steps, self._limits)
        return bool(finite)

    def _warn(self) -> None:
        """Once, when the residual is about to lose or to explode."""
        taken = self.step + 1
        if self._warned or self.residual is None or taken < WARN_AFTER:
            return
        if self.options.residual == "own":
            if self.clipped_fraction > OWN_WARNING and self.comm.rank == 0:
                self._warned = True
                warnings.warn(
                    f"{self.clipped_fraction:.0%} of the residual is clipped at step {self.step}: gamma is too small",
                    RuntimeWarning, stacklevel=6,
                )  # fmt: skip
        elif taken % WARN_AFTER == 0:  # the residual is longest just before a full-precision round
            sample = self.residual[: min(SAMPLE, self._lengths[0])].copy()
            subtract_result(sample, self._bits, self._pending[0])
            swing = float(np.abs(sample).mean() / self._pending[0]) if self._pending[0] else 0.0
            if swing > PAPER_WARNING:
                self._warned = True
                warnings.warn(
                    f"rank {self.comm.rank}: the residual is {swing:.1f} times the global step at step {self.step}: "
                    "divergence is ahead; use residual='own'",
                    RuntimeWarning, stacklevel=6,
                )  # fmt: skip

    # State -----------------------------------------------------------------------------------------------------------

    def settled_residual(self) -> NDArray[Any] | None:
        """The residual with nothing pending; a copy."""
        if self.residual is None:
            return None
        settled = self.residual.copy()
        if self._lazy:
            for part in self._every_part():
                subtract_result(settled[part.elements], part.bits, self._pending[part.segment])
        return settled

    def state_dict(self) -> dict[str, Any]:
        """Step counter, settled residual, running magnitudes and gamma.

        Raises
        ------
        RuntimeError
            NaN or infinity spoiled the residual: there is nothing to go on from.
        """
        self._check_ready()
        settled = self.settled_residual()
        residual = {} if settled is None else {"residual": settled}
        return self._state(gamma=self.gamma, magnitudes=self._magnitudes.copy(), **residual)

    def _like(self) -> dict[str, NDArray[Any]]:
        residual = {} if self.residual is None else {"residual": self.residual}
        return {"gamma": np.zeros(()), "magnitudes": self._magnitudes, **residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, to the bit; all ranks load what was taken at one step.

        Raises
        ------
        ValueError
            The state is another method's, of another length, other tensors or without a residual that is needed, or
            not finite. Nothing is changed then.
        """
        taken = self._taken(state)
        if self.residual is not None:
            self.residual[:] = taken["residual"]
        running = taken["magnitudes"].copy()
        self.step, self._magnitudes = taken["step"], running
        if self.options.gamma == "auto":
            self.gamma = float(taken["gamma"])
        # the ranks' steps must stay the same to the bit, so they compare what they go on with
        self._restored(f"gamma {self.gamma!r} and magnitudes {fingerprint(running.tobytes().hex()):x}")
        self._pending[:] = 0
        self._spoiled = False
