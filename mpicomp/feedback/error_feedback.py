"""Error feedback: a rank encodes its vector plus a residual, and keeps in the residual what the codec left out.

A rule compensates the vector by the residual, which gives p; Q(p) is sent, and the residual becomes the part that Q
left out. No pass looks for NaN beforehand: codecs reject it while they encode, and the next residual is kept next to
the old one until all ranks have reported that they met none. The encoder works on pieces that fit the caches, so that
a vector is read from memory once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from collectives.annotations import Array, override
from collectives.arrays.elements import round_in_place
from mpicomp import kernels
from mpicomp.codecs.base import Codec, Draw, has_residual, is_averaging
from mpicomp.feedback.base import Residual, StateKind
from mpicomp.feedback.payloads import QUIET, codec_in
from mpicomp.kernels.streams import Stream
from mpicomp.spaces import Space
from mpicomp.spaces.finite_flag import FiniteFlag

_FLOATS = {4: np.float32, 8: np.float64}


class ErrorRule(Protocol):
    """Rule by which a residual enters a step, and takes up the codec's error.

    All arrays have one length and dtype, and are in the host's memory or on one device.
    """

    def compensate(self, values: Array, residual: Array, out: Array) -> None:
        """Overwrite `out` with the vector that is encoded."""

    def keep(self, values: Array, compensated: Array, sent: Array, residual: Array, out: Array) -> Any:
        """Overwrite `out` with the next residual; `sent` is the decoded form of `compensated`.

        Returns
        -------
        bool, or bool[] on a device
            Whether it is finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class ErrorFeedback(ErrorRule):
    """Rule p = g + decay e; e <- p - Q(p).

    Parameters
    ----------
    decay : float
        Fraction of the residual that enters a step; 1: all of it.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.feedback.error_feedback import ErrorFeedback
    >>> rule, gradient, residual = ErrorFeedback(), np.array([1.0, 4.0]), np.array([0.5, 0.0])
    >>> encoded, following = np.empty(2), np.empty(2)
    >>> rule.compensate(gradient, residual, encoded)
    >>> rule.keep(gradient, encoded, np.array([0.0, 4.0]), residual, following)
    True
    >>> following.tolist()
    [1.5, 0.0]
    """

    decay: float = 1.0

    @override
    def compensate(self, values: Array, residual: Array, out: Array) -> None:
        decay = None if self.decay == 1 else _FLOATS[out.itemsize](self.decay)
        kernels.beside(out).arrays.compensate(values, residual, decay, out)

    @override
    def keep(self, values: Array, compensated: Array, sent: Array, residual: Array, out: Array) -> Any:
        return kernels.beside(out).arrays.keep(compensated, sent, residual, None, out)

    def in_codec(self, codec: Codec) -> Callable[[Array, Array, Array, Array], Any] | None:
        """Return the codec's `encode_keeping` by this rule, if it has one: fewer passes, to the same bits."""
        if not has_residual(codec) or codec.fuses == "sent":
            return None
        if codec.fuses == "decayed residual":
            return partial(codec.encode_keeping, decay=self.decay)
        return codec.encode_keeping if self.decay == 1 else None


@dataclass(frozen=True, slots=True)
class ErrorAccumulation(ErrorRule):
    """p = g + alpha h; h <- beta h + (g - Q(p))."""

    alpha: float
    beta: float

    @override
    def compensate(self, values: Array, residual: Array, out: Array) -> None:
        kernels.beside(out).arrays.compensate(values, residual, _FLOATS[out.itemsize](self.alpha), out)

    @override
    def keep(self, values: Array, compensated: Array, sent: Array, residual: Array, out: Array) -> Any:
        return kernels.beside(out).arrays.keep(values, sent, residual, _FLOATS[out.itemsize](self.beta), out)


class _Scratch(threading.local):
    """A thread's memory for what of a piece is encoded, for the values that others decode, and for those in 16 bits."""

    def __init__(self, longest: int, dtype: type[np.floating], applied: str | None) -> None:
        self.compensated, self.sent = np.empty(longest, dtype), np.empty(longest, dtype)
        kind = np.uint16 if applied == "bfloat16" else applied
        self.rounded = np.empty(0 if applied is None else longest, kind)


class FeedbackEncoder:
    """Encodes a rank's pieces, and keeps the residual. Several threads may encode different pieces at once.

    Attributes
    ----------
    codec : Codec
        As vectors are encoded where they are; see `codec_in`.
    residual : Residual
        Of n elements, or 0 without feedback.
    finite : FiniteFlag
        All that was encoded at this step is finite; zeros were sent for the rest. On a device it is known once the
        payloads have been copied to the host.

    Parameters
    ----------
    space : Space
    codec : Codec
    rule : ErrorRule, optional
        None: no residual is kept.
    n : int
    dtype : type
        float32 or float64.
    longest : int
        Elements of the longest piece.
    stream : Stream
    rank : int
    applied : "float16" or "bfloat16", optional
        The decoded values are rounded to this type where they are applied, and the residual includes that.
    kind : "mean" or "owner"
        Of the residual.
    ranks : int
        Ranks that encode the same elements.
    """

    def __init__(
        self,
        space: Space,
        codec: Codec,
        rule: ErrorRule | None,
        n: int,
        dtype: type[np.floating],
        longest: int,
        stream: Stream,
        rank: int,
        applied: str | None = None,
        kind: StateKind = "mean",
        ranks: int = 1,
    ) -> None:
        self._launch, self._is_host, self._dtype, self._applied = space.launch, space.is_host, dtype, applied
        self.codec, self._step = codec_in(space, codec), 0
        self._rule, self._stream, self._rank, self._ranks = rule, stream, rank, ranks
        self.residual, self.finite = Residual(space, 0 if rule is None else n, dtype, kind), space.flag()
        simple = rule if isinstance(rule, ErrorFeedback) and applied is None else None
        self._encode_keeping = simple.in_codec(self.codec) if simple is not None else None
        # on a device memory for a piece is allocated when its kernels are launched
        needed = longest if rule is not None and self._encode_keeping is None and self._is_host else 0
        self._scratch = _Scratch(needed, dtype, applied)

    def begin(self, step: int) -> None:
        """Go to another step."""
        self._step = step
        self.finite.reset()

    def encode(self, part: Array, cut: range, payload: Array, finite: FiniteFlag | None = None) -> None:
        """Overwrite `payload` with Q of the elements `cut` of a vector, and the next residual with the rest.

        finite : cleared in place of the encoder's own flag.
        """
        self._launch(self._encode, part, cut, payload, self.finite if finite is None else finite)

    @QUIET
    def _encode(self, part: Array, cut: range, payload: Array, finite: FiniteFlag) -> None:
        finite.check(self._encode_piece, part, cut, payload, finite)

    def _encode_piece(self, part: Array, cut: range, payload: Array, flag: FiniteFlag) -> Any:
        """Encode a piece; returns whether it is finite: a bool, or bool[] on a device."""
        draw = self.draw(cut)
        if self._rule is None:
            return self._write(part, payload, draw)
        residual, following = self.residual.current[cut.start : cut.stop], self.residual.following[cut.start : cut.stop]
        if self._encode_keeping is not None:
            return self._try(
                partial(self._encode_keeping, part, residual, payload, following), following, payload, draw
            )
        if self._is_host:
            compensated, sent = self._scratch.compensated[: len(part)], self._scratch.sent[: len(part)]
        else:
            compensated, sent = part.new_empty(len(part)), part.new_empty(len(part))
        self._rule.compensate(part, residual, compensated)
        finite = self._write(compensated, payload, draw, sent)
        if self._applied is not None:
            rounded = self._scratch.rounded[: len(cut)]
            round_in_place(sent, self._applied, rounded)
        kept = self._rule.keep(part, compensated, sent, residual, following)
        if self._is_host:
            return finite & kept
        flag.clear_unless(finite)
        return kept

    def draw(self, cut: range) -> Draw:
        """Return the place in the random stream that a piece of this step begins at."""
        return Draw(self._stream, self._step, self._rank, 0, cut.start, self._ranks)

    def _write(self, values: Array, payload: Array, draw: Draw, sent: Array | None = None) -> Any:
        """Encode, and overwrite `sent`, if it is given, with the values that others will decode."""
        codec = self.codec
        if sent is not None and has_residual(codec) and codec.fuses == "sent":
            return self._try(partial(codec.encode_telling, values, payload, sent, draw=draw), values, payload, draw)
        finite = self._try(partial(codec.encode, values, payload, draw=draw), values, payload, draw)
        if sent is not None:
            codec.decode(payload, sent, weight=1)
        return finite

    def _try(self, encode: Callable[[], Any], values: Array, payload: Array, draw: Draw) -> Any:
        """Encode values, or on the host zeros where they cannot be encoded; returns whether they can."""
        if not self._is_host:
            return encode()
        try:
            encode()
            return True
        except OverflowError:
            pass
        except ValueError:
            if kernels.of("cpu").sign.all_finite(values):
                raise
        # the others wait for a payload that they can decode; the reports at the end name this rank
        self.codec.encode(np.zeros(len(values), self._dtype), payload, draw=draw)
        return False


@QUIET
def take_mean(codec: Codec, payloads: Sequence[Array], mean: Array, decoded: Array | None) -> None:
    """Overwrite `mean` with the mean of decoded payloads, added up in their order.

    decoded : like mean, overwritten too; None on a device, where memory is allocated as it is needed.
    """
    codec.decode(payloads[0], mean, weight=1)
    if is_averaging(codec):  # in one pass, or touching few elements
        for payload in payloads[1:]:
            codec.add(payload, mean)
    else:
        decoded = mean.new_empty(len(mean)) if decoded is None else decoded
        for payload in payloads[1:]:
            codec.decode(payload, decoded, weight=1)
            mean += decoded
    if len(payloads) > 1:
        kernels.beside(mean).arrays.divide(mean, len(payloads))
