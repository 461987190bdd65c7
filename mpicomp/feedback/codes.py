"""Feedback of methods whose ranks send codes: each rank encodes its own vector, and owners perhaps the mean.

A step that meets NaN, infinity or an overflow, on whichever rank, gives all ranks the same error and changes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.annotations import Array, Bytes, Doubles, Testable, override
from collectives.arrays import after_copy
from mpicomp.codecs.base import Codec, Finite, is_averaging, is_variable
from mpicomp.codecs.bucketed import count
from mpicomp.feedback.base import Feedback, Problem, Residual, State, StateKind, StepInput, bad_ranks
from mpicomp.feedback.error_feedback import FeedbackEncoder, take_mean
from mpicomp.feedback.payloads import Decode, Payloads, Results
from mpicomp.feedback.rounds import Round
from mpicomp.spaces import Space
from mpicomp.state.state_check import OWNED, check_owned

SHARE_ELEMENTS = 1 << 21  # of which one worker measures the scales at a time
_GOOD, _OVERFLOWED, _BAD = 0, 1, 2  # a rank's report of its step


class SharedScales(NamedTuple):
    """Scales of a vector's buckets that all ranks encode with: the largest of the ranks' own.

    Attributes
    ----------
    bucket : int
        Elements that share a scale.
    measure : callable
        ``measure(values)`` returns this rank's float32 scales of whole buckets; infinity where one is not finite.
    codec_with : callable
        ``codec_with(scales)`` returns the codec that encodes with these scales.
    """

    bucket: int
    measure: Callable[[Array], Array]
    codec_with: Callable[[Array], Codec]


class Codes(Feedback):
    """Base of the two: a rank's encoders, its payloads, and the result.

    A method that keeps more than the encoders' residuals subclasses one of the two, adds its `Residual` objects to
    `residuals`, and overrides `_part`; `mpicomp help extending` has an example.

    Parameters
    ----------
    space : Space
    encoders : dict of str to FeedbackEncoder
        By the keys of their residuals in the state. The first encodes this rank's own vector.
    cuts : sequence of range
        Elements of each piece of the vector.
    payloads : Payloads
        Of this rank's codec.
    results : Results
    """

    n_reports = 1

    def __init__(
        self,
        space: Space,
        encoders: Mapping[str, FeedbackEncoder],
        cuts: Sequence[range],
        payloads: Payloads,
        results: Results,
    ) -> None:
        super().__init__(space, {key: encoder.residual for key, encoder in encoders.items()})
        self.encoders, self._mine = dict(encoders), next(iter(encoders.values()))
        self._cuts, self._payloads, self._results = cuts, payloads, results
        self._values: Array = None
        self._encoded = list[int]()  # pieces of this step, on a device
        self._scales: SharedScales | None = None

    def share_scales(self, scales: SharedScales) -> None:
        """Have the ranks agree on scales before each step."""
        n = self._cuts[-1].stop if self._cuts else 0
        buckets = count(n, scales.bucket)
        self._scales, self.announced_bytes = scales, 4 * buckets
        self._agreed = self.space.mirror(self.space.zeros(buckets, "float32"))  # at first this rank's own
        step = scales.bucket * max(1, SHARE_ELEMENTS // scales.bucket)
        if self.space.is_host and n > step:
            self.measured_in = [range(start, min(n, start + step)) for start in range(0, n, step)]

    @property
    @override
    def residual(self) -> Array | None:
        """Error of this rank's own encoding, where the vector is: [n], [0] without feedback, None without residuals."""
        return self._mine.residual.current if self.residuals else None

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._values = call.values
        self._results.begin(call.out)
        for encoder in self.encoders.values():
            encoder.begin(call.step)
        self._encoded.clear()

    @override
    def end(self) -> None:
        super().end()
        self._values = None
        self._results.begin(None)

    @override
    def reports_first(self, step: int) -> bool:
        return self._scales is not None

    @override
    def measure(self) -> Testable | None:
        self.launch(self._measure_into, self._values, self._agreed.there)
        return self._agreed.fetch()

    @override
    def measure_share(self, share: range) -> None:
        assert self._scales is not None
        first, stop = share.start // self._scales.bucket, -(-share.stop // self._scales.bucket)
        self._measure_into(self._values[share.start : share.stop], self._agreed.there[first:stop])

    def _measure_into(self, values: Array, scales: Array) -> None:
        assert self._scales is not None
        scales[:] = self._scales.measure(values)

    @override
    def announce(self, row: Doubles, announced: Bytes) -> None:
        announced.view(np.float32)[:] = self._agreed.here

    @override
    def adopt_announced(self, reports: Doubles, announced: Sequence[Bytes]) -> Problem | None:
        assert self._scales is not None
        everyones = np.stack([scales.view(np.float32) for scales in announced])
        # all ranks take the maximum of the same numbers, so NaN cannot make the ranks differ
        if bad := bad_ranks(~np.isfinite(everyones).all(axis=1)):
            return Problem(bad)
        self._agreed.send(everyones.max(axis=0, initial=0))
        self._mine.codec = self._scales.codec_with(self._agreed.there)
        return None

    def _part(self, cut: range) -> Array:
        """Return the elements to encode: a piece of this rank's vector, unless a subclass alters it."""
        return self._values[cut.start : cut.stop]

    @abstractmethod
    def _mean_of(self, piece: int) -> Decode:
        """Return the function that overwrites a piece of the result with the decoded mean."""

    def _encode(self, piece: int, cut: range) -> None:
        """Encode a piece of this rank's vector."""
        payloads = self._payloads
        finite = payloads.finite[piece] if payloads.finite else None
        if finite is not None:
            finite.reset()
            self._encoded.append(piece)
        self._mine.encode(self._part(cut), cut, payloads.there[piece], finite)

    @override
    def report(self, row: Doubles) -> None:
        mine, *others = (not encoder.finite for encoder in self.encoders.values())
        mine = mine or not all(map(bool, [self._payloads.finite[piece] for piece in self._encoded]))
        bad = mine and not self.all_finite(self._values)  # else finite numbers overflowed
        row[0] = _BAD if bad else _OVERFLOWED if mine or any(others) else _GOOD

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        reported = reports[:, 0]
        if self._results.finite and not reported.any():
            return None
        bad, overflowed = bad_ranks(reported == _BAD), bad_ranks(reported == _OVERFLOWED)
        reason = self._mine.codec.out_of_range
        if reason and overflowed and not bad:
            return Problem(overflowed, out_of_range=reason)
        return Problem(bad)


class GatheredCodes(Codes):
    """Codes of all ranks are gathered, and decoded in rank order.

    Parameters
    ----------
    space, encoders, cuts, results
        As in `Codes`.
    payloads : Payloads
        Payloads of all ranks, rank by rank, each with all of its pieces.

    Examples
    --------
    `mpicomp help extending` has a subclass. `all_gather` makes one:

    >>> import mpicomp
    >>> from mpicomp.feedback.codes import GatheredCodes
    >>> with mpicomp.Communicator() as comm:
    ...     codes = mpicomp.QSGD().start(comm, 4).feedback
    >>> isinstance(codes, GatheredCodes), codes.n_reports, codes.reports_when
    (True, 1, 'beside')
    """

    reports_when = "beside"  # only the encoding of this rank's own vector can fail

    @override
    def encode(self, piece: int) -> Testable | None:
        cut = self._cuts[piece % len(self._cuts)]
        self._encode(piece, cut)
        return self._payloads.fetch(piece)

    @override
    def decode(self, piece: int) -> Testable | None:
        return self._results.write(self._cuts[piece], self._mean_of(piece))

    @override
    def _mean_of(self, piece: int) -> Decode:
        payloads, codec, of_rank = self._payloads, self._payloads.codec, len(self._cuts)
        if is_averaging(codec) and not self.space.is_host:
            rows = payloads.rows(piece, of_rank)
            return lambda mean, _: codec.mean(rows, mean)
        return partial(take_mean, codec, payloads.there[piece::of_rank])


class OwnedCodes(Codes):
    """Codes go to the owner of each piece, which sends a code of their mean to all ranks.

    Parameters
    ----------
    space, encoders, cuts, payloads, results
        As in `Codes`. If the owner keeps an error, `encoders` has its encoder too.
    owner : FeedbackEncoder
        Encodes means, on the host.
    means : Payloads
        Of the owners' codec.
    sent : dict of int to list of uint8 arrays
        Per owned piece the payloads of all ranks, in rank order, in the host's memory.
    codec : Codec
        As these payloads are encoded.
    ranks : int
    own : range or None
        Elements that this rank owns; None: owners keep no error.
    """

    def __init__(
        self,
        space: Space,
        encoders: Mapping[str, FeedbackEncoder],
        cuts: Sequence[range],
        payloads: Payloads,
        results: Results,
        owner: FeedbackEncoder,
        means: Payloads,
        sent: Mapping[int, Sequence[Bytes]],
        codec: Codec,
        ranks: int,
        own: range | None,
    ) -> None:
        super().__init__(space, encoders, cuts, payloads, results)
        # owners encode the codes of others, which can fail too, but not with a codec that is exact
        self.reports_when = "after" if owner in self.encoders.values() else "beside"
        self._owner, self._means, self._sent = owner, means, sent
        self._codec, self._ranks, self._own = codec, ranks, own

    @override
    def rounds(self) -> tuple[Round, ...]:
        return (Round(self.encode, self.decode, complete=self.encode_mean),)

    @override
    def encode(self, piece: int) -> Testable | None:
        cut = self._cuts[piece]
        self._encode(piece, cut)
        encoded = self._payloads.fetch(piece)
        return after_copy(encoded, partial(self.encode_mean, piece)) if self._ranks == 1 else encoded

    def encode_mean(self, piece: int) -> None:
        """Encode the mean of an owned piece, of which the codes of all ranks are there."""
        cut, scratch = self._cuts[piece], self._results.scratch
        mean = scratch.mean[: len(cut)]
        take_mean(self._codec, self._sent[piece], mean, scratch.decoded[: len(cut)])
        self._owner.encode(mean, cut, self._means.host[piece])

    @override
    def decode(self, piece: int) -> Testable | None:
        self._means.deliver(piece)
        return self._results.write(self._cuts[piece], self._mean_of(piece))

    @override
    def _mean_of(self, piece: int) -> Decode:
        codec, payload = self._means.codec, self._means.there[piece]
        decode: Callable[[Array], Finite] = partial(codec.decode, payload, weight=self._ranks)
        if is_averaging(codec) and not self.space.is_host:
            decode = partial(codec.mean, payload.view(1, -1))  # which also looks for values that are not finite
        elif is_variable(codec) and codec.varies:
            decode = partial(codec.decode_drawn, payload, draw=self._owner.draw(self._cuts[piece]))
        return lambda out, _: decode(out)

    # State -----------------------------------------------------------------------------------------------------------

    @property
    @override
    def state_kinds(self) -> dict[str, StateKind]:
        kinds = super().state_kinds
        return kinds | {OWNED: "owned"} if kinds and self._owner in self.encoders.values() else kinds

    @override
    def state(self) -> State:
        """Copies of the errors, and the range of elements whose owner's error the state has."""
        state = super().state()
        return state if self._own is None else state | {OWNED: np.array([self._own.start, self._own.stop])}

    @override
    def check_owner(self, state: dict[str, Any], where: str) -> None:
        if self._own is not None:
            for key in self._owners_errors():
                check_owned(state, key, self._own, where)

    @override
    def load(self, state: State) -> str:
        """Take over a state; only the owner's errors of the elements that this rank owns."""
        compared = super().load(state)
        if self._own is not None:
            for errors in self._owners_errors().values():
                errors.current[: self._own.start] = 0
                errors.current[self._own.stop :] = 0
        return compared

    def _owners_errors(self) -> dict[str, Residual]:
        return {key: one for key, one in self.residuals.items() if one.kind == "owner"}
