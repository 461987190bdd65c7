"""Feedback of relayed sums: a rank encodes its partial sum of each piece once, and keeps the error of its own hop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np

from collectives.annotations import Array, Doubles, Testable, override
from collectives.execution.program import Message, Program
from mpicomp.codecs import entropy_levels
from mpicomp.codecs.base import Finite
from mpicomp.codecs.level_buckets import Buckets
from mpicomp.codecs.levels import STREAMING_ELEMENTS, Levels
from mpicomp.feedback.base import Feedback, Problem, Residual, StepInput, bad_ranks, compute_type
from mpicomp.feedback.payloads import Payloads, Results
from mpicomp.feedback.rounds import Round
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.spaces import Space

MOST_LANDING = 4  # messages that may land at once
FINE, OWN, SUM = 0.0, 1.0, 2.0  # reports: this rank's numbers are finite, its own are not, or a sum is not


@dataclass(frozen=True)
class TensorLevels(Levels):
    """Levels of one vector, whose buckets are counted from the start of each tensor."""

    tensor_lengths: tuple[int, ...] | None = None

    @property
    @override
    def alignment(self) -> int:
        if self.tensor_lengths is None:
            return self.bucket
        # the whole vector: a piece of it would have buckets of its own
        return 64 * sum(-(-length // 64) for length in self.tensor_lengths)

    @override
    def buckets(self, n: int) -> Buckets:
        # each call of the codec needs them, several times a step; they end with the vector, as they may be large
        if n not in self._laid_out:
            groups = ScaleGroups.of(self.tensor_lengths, n, self.bucket)
            self._laid_out[n] = self.lay_out(groups.starts, groups.lengths)
        return self._laid_out[n]

    @cached_property
    def _laid_out(self) -> dict[int, Buckets]:
        return {}


class RelayedSums(Feedback):
    """Partial sums of one vector, and the errors of their codes.

    All ranks decode the same bytes, in which a sum that is not finite has a scale of NaN. So they agree without reports
    that a step must fail, and report only then which of them is to blame.

    Parameters
    ----------
    space : Space
        Where the vector is encoded; only codes cross to the host.
    codec : Levels
    buckets : Buckets
        Of the vector.
    program : Program
        Its pieces are ranges of buckets.
    n, dtype
        Elements and type of the vector.
    keeps : bool
        False: the caller adds the errors of a step to the next vector.

    Attributes
    ----------
    pieces : list of range
        Elements of each piece, and the gap behind it.
    held, landing : Payloads
        Code of each piece, and memory for those that land.
    """

    n_reports = 1

    def __init__(
        self, space: Space, codec: Levels, buckets: Buckets, program: Program, n: int, dtype: str, keeps: bool
    ) -> None:
        kind = compute_type(dtype)
        super().__init__(space, {"residual": Residual(space, n, kind)} if keeps else {})
        self._left_out = None if keeps else space.zeros(n, kind)
        self._codec, self._size, chains = codec, program.plan.size, program.chains
        self._merges = [sum(one.held_weight > 0 and not one.is_send for one in chain) for chain in chains]
        # flags: the complete sum comes from another rank
        lasts = zip(chains, program.last_recv, strict=True)
        self._replaced = [last >= 0 and not chain[last].held_weight for chain, last in lasts]
        if not space.is_host:
            buckets = buckets.on(lambda table: space.sent(table).there)
        self._buckets = [buckets.part(cut) for cut in program.pieces]
        starts = [int(part.starts[0]) for part in self._buckets]
        self.pieces = [range(start, stop) for start, stop in zip(starts, [*starts[1:], n], strict=False)]
        sizes = [part.nbytes for part in self._buckets]
        landing = min(MOST_LANDING, len(program.recvs)) if any(self._merges) else 0
        lengths, used = [len(part.starts) for part in self._buckets], None
        if codec.coding == "entropy":
            used = entropy_levels.count_used
        self.held = Payloads(space, codec, lengths, flags=False, sizes=sizes, used=used)
        longest = [max(sizes, default=0)] * landing
        self.landing = Payloads(space, codec, longest, flags=False, sizes=longest)
        self._results = Results(space, dtype, max(map(len, self.pieces), default=0))
        self._streaming = space.is_host and n >= STREAMING_ELEMENTS
        self._values: Array = np.empty(0, np.float32)

    @override
    def rounds(self) -> tuple[Round, ...]:
        return (Round(self.encode, self.decode, self.merge),)

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._values = call.values
        self._results.begin(call.out)

    @override
    def end(self) -> None:
        super().end()
        self._values = np.empty(0, np.float32)
        self._results.begin(None)

    @override
    def encode(self, piece: int) -> Testable | None:
        if self._merges[piece] or self._size == 1:
            return None
        self._relay(piece, self.held.there[piece], True)
        return self.held.fetch(piece)

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Add a code that has landed to the sum of its piece; encode the sum if nothing more is added to it."""
        piece = message.piece
        held = self.held.there[piece]
        last = message.ordinal == self._merges[piece] - 1
        self.landing.deliver(buffer)
        self._relay(piece, held if last else None, message.ordinal == 0, self.landing.there[buffer][: len(held)])
        return self.held.fetch(piece) if last else self.space.done()

    def _relay(self, piece: int, payload: Array | None, is_first: bool, incoming: Array | None = None) -> None:
        cut = self.pieces[piece]
        old, new = self._residuals(slice(cut.start, cut.stop))
        own = (self._values[cut.start : cut.stop], old) if is_first else None
        streaming = self._streaming and payload is not None
        # a sum that is not finite makes the result so
        relay = partial(self._codec.relay, self._buckets[piece], new, payload, own, incoming, cut.start, streaming)
        self.launch(self._results.finite.check, relay)

    def _residuals(self, part: slice) -> tuple[Array | None, Array]:
        """Return a part of the residual of before, if it is kept, and of the errors of this step."""
        if self._left_out is not None:
            return None, self._left_out[part]
        residual = self.residuals["residual"]
        return residual.current[part], residual.following[part]

    @property
    @override
    def residual(self) -> Array | None:
        """See `Feedback`; if it is not kept, the errors of the last step."""
        return super().residual if self._left_out is None else self._left_out

    @override
    def decode(self, piece: int) -> Testable | None:
        if self._replaced[piece]:
            self.held.deliver(piece)
        return self._results.write(self.pieces[piece], partial(self._decode, piece))

    def _decode(self, piece: int, out: Array, scratch: Array) -> Finite:
        cut = self.pieces[piece]
        if self._size > 1:
            return self._codec.spread(self._buckets[piece], self.held.there[piece], self._size, cut.start, out)
        part = slice(cut.start, cut.stop)
        old, new = self._residuals(part)
        if old is None:
            out[:] = self._values[part] + 0  # as a sum, which has no negative zero
        else:
            self.kernels.arrays.compensate(self._values[part], old, None, out)
        new[:] = 0
        return self.kernels.sign.all_finite(out)

    # Failures --------------------------------------------------------------------------------------------------------

    @property
    def reports_when(self) -> Literal["after"] | None:  # type: ignore[override]
        """Ranks report once they know that the step must fail."""
        # a property in place of the attribute: it follows from the decoded pieces, and cannot be set; the driver reads
        # it before they are there, too
        return None if self._results.finite.landed else "after"

    @override
    def report(self, row: Doubles) -> None:
        own = self._values, self._residuals(slice(None))[0]
        row[0] = SUM if all(one is None or self.all_finite(one) for one in own) else OWN

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        return Problem(bad_ranks(reports[:, 0] == OWN))
