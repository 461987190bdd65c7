"""What a rank keeps of what its codec left out, and gives to the next step: a rank's half of a step.

p = what feedback makes of the vector and the residual, Q(p) is sent, and the residual becomes what Q left out. No pass
looks for NaN beforehand: codecs reject them while they encode, and the next residual is kept beside the old one until
all ranks have said that they met none. Works on parts of vectors that fit the caches, so that a vector is read from
memory once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from collectives.memory import narrow, widen
from mpicomp import kernels
from mpicomp.codecs.base import Bytes, Codec, Draw, Extended
from mpicomp.kernels.streams import Stream

QUIET = np.errstate(over="ignore", invalid="ignore")
"""NumPy does not warn of what the ranks look for and tell each other."""
_FLOATS = {4: np.float32, 8: np.float64}


class ErrorRule(Protocol):
    """How a residual enters a step and what a codec's error becomes.

    All arrays are of one length and dtype, and in the host's memory or on a device.
    """

    def compensate(self, values: Any, residual: Any, out: Any) -> None:
        """Overwrite `out` with what is to be encoded."""

    def keep(self, values: Any, compensated: Any, sent: Any, residual: Any, out: Any) -> Any:
        """Overwrite `out` with the next residual; `sent` is what the codec made of `compensated`.

        Returns
        -------
        bool, or bool[] on a device
            Whether it is finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """p = g + e; e <- p - Q(p)."""

    def compensate(self, values: Any, residual: Any, out: Any) -> None:
        """See `ErrorRule`."""
        kernels.beside(out).error_feedback.compensate(values, residual, None, out)

    def keep(self, values: Any, compensated: Any, sent: Any, residual: Any, out: Any) -> Any:
        """See `ErrorRule`."""
        return kernels.beside(out).error_feedback.keep(compensated, sent, residual, None, out)


@dataclass(frozen=True, slots=True)
class ErrorAccumulation:
    """p = g + alpha h; h <- beta h + (g - Q(p))."""

    alpha: float
    beta: float

    def compensate(self, values: Any, residual: Any, out: Any) -> None:
        """See `ErrorRule`."""
        kernels.beside(out).error_feedback.compensate(values, residual, _FLOATS[out.itemsize](self.alpha), out)

    def keep(self, values: Any, compensated: Any, sent: Any, residual: Any, out: Any) -> Any:
        """See `ErrorRule`."""
        return kernels.beside(out).error_feedback.keep(values, sent, residual, _FLOATS[out.itemsize](self.beta), out)


class KeptArrays:
    """What `Feedback` asks for where a state is arrays: the attributes named by `state_kinds` that are not None."""

    state_kinds: ClassVar[dict[str, Any]] = {"residual": "mean"}
    state_nan: ClassVar[str] = ""

    def check_ready(self) -> None:
        """See `Feedback`: always ready."""

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        return {key: array for key in self.state_kinds if (array := getattr(self, key)) is not None}

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of the arrays."""
        return {key: array.copy() for key, array in self.like().items()}

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        for key, array in self.like().items():
            array[:] = state[key]
        return ""


class _Scratch(threading.local):
    """A thread's memory for what of a piece is encoded, what others will decode, and that rounded to 16 bits."""

    def __init__(self, longest: int, dtype: np.dtype[Any], applied: str | None) -> None:
        self.compensated, self.sent = np.empty(longest, dtype), np.empty(longest, dtype)
        kind = np.uint16 if applied == "bfloat16" else applied
        self.rounded = np.empty(0 if applied is None else longest, kind)


class FeedbackEncoder:
    """Encodes a rank's pieces, and keeps the residual. Several threads may encode at once, each another piece.

    Attributes
    ----------
    residual : ndarray[n], or [0] without feedback
        Of the steps that are done; what this step makes of it takes its place by `commit`.
    failed : bool
        Something was not finite at this step; zeros were sent for it.

    Parameters
    ----------
    codec : Codec
    feedback : ErrorRule, optional
        None: nothing is kept.
    n : int
    dtype : dtype
        float32 or float64.
    longest : int
        Elements of the longest piece.
    stream : Stream
    rank : int
    applied : "float16" or "bfloat16", optional
        What is decoded is rounded to this type where it is applied, and feedback includes that.
    """

    def __init__(
        self,
        codec: Codec,
        feedback: ErrorRule | None,
        n: int,
        dtype: np.dtype[Any],
        longest: int,
        stream: Stream,
        rank: int,
        applied: str | None = None,
    ) -> None:
        self._applied, self._dtype = applied, dtype
        self.codec, self.step, self._failed = codec, 0, False
        self._feedback, self._stream, self._rank = feedback, stream, rank
        self.residual, self._next = (self._zeros(n if feedback is not None else 0, dtype) for _ in range(2))
        # some codecs do error feedback themselves, in fewer passes and to the same bits
        itself = isinstance(feedback, ErrorFeedback) and applied is None
        self._keeps = itself and hasattr(codec, "encode_keeping")
        self._scratch = self._memory(longest if feedback is not None and not self._keeps else 0, dtype)

    def _zeros(self, n: int, dtype: Any) -> Any:
        return np.zeros(n, dtype)

    def _memory(self, longest: int, dtype: np.dtype[Any]) -> Any:
        return _Scratch(longest, dtype, self._applied)

    @property
    def failed(self) -> bool:
        """See the attributes."""
        return self._failed

    def begin(self, step: int) -> None:
        """Go to another step."""
        self.step, self._failed = step, False

    @QUIET
    def encode(self, part: NDArray[Any], cut: range, payload: Bytes) -> None:
        """Overwrite `payload` with Q of a part of a vector, the elements of `cut`, and keep what it leaves out."""
        if not self._encode(part, cut, payload):
            self._failed = True

    def _encode(self, part: Any, cut: range, payload: Bytes) -> Any:
        """As `encode`; returns whether all is finite."""
        draw = self.draw(cut)
        if self._feedback is None:
            return self._write(part, payload, draw)
        residual, following = (whole[cut.start : cut.stop] for whole in (self.residual, self._next))
        if self._keeps:
            keeping = cast(Extended, self.codec).encode_keeping
            return self._try(partial(keeping, part, residual, payload, following), following, payload, draw)
        compensated, sent = self._two(part)
        self._feedback.compensate(part, residual, compensated)
        finite = self._write(compensated, payload, draw, sent)
        if self._applied is not None:
            rounded = self._scratch.rounded[: len(cut)]
            narrow(sent, self._applied, rounded)
            widen(rounded, self._applied, sent)
        return finite & self._feedback.keep(part, compensated, sent, residual, following)

    def draw(self, cut: range) -> Draw:
        """From where the encoder of a piece draws, at this step."""
        return Draw(self._stream, self.step, self._rank, 0, cut.start)

    def _two(self, part: Any) -> tuple[Any, Any]:
        """Memory for what is encoded of a part, and for what others will decode."""
        return self._scratch.compensated[: len(part)], self._scratch.sent[: len(part)]

    def _write(self, values: Any, payload: Bytes, draw: Draw, sent: Any = None) -> Any:
        """Encode, and overwrite `sent`, if it is given, with the values that others will decode."""
        telling = None if sent is None else getattr(self.codec, "encode_telling", None)
        if telling is not None:
            return self._try(partial(telling, values, payload, sent, draw=draw), values, payload, draw)
        finite = self._try(partial(self.codec.encode, values, payload, draw=draw), values, payload, draw)
        if sent is not None:
            self.codec.decode(payload, sent, weight=1)
        return finite

    def _try(self, encode: Callable[[], Any], values: NDArray[Any], payload: Bytes, draw: Draw) -> Any:
        """Encode values, or zeros where they cannot be encoded; returns whether they can."""
        try:
            encode()
            return True
        except OverflowError:
            pass
        except ValueError:
            if self.all_finite(values):
                raise
        # the others wait for a payload that they can decode, and are told at the end
        self.codec.encode(np.zeros(len(values), self._dtype), payload, draw=draw)
        return False

    def all_finite(self, values: Any) -> bool:
        """Whether a float32 or float64 vector has neither NaN nor infinity."""
        return bool(kernels.of("cpu").sign.all_finite(values))

    def commit(self) -> None:
        """The step is good on all ranks: its residual is the next step's."""
        self.residual, self._next = self._next, self.residual

    def undo(self) -> None:
        """Take `commit` back: until something is encoded again, the residual of before is where the next one goes."""
        self.residual, self._next = self._next, self.residual

    @property
    def like(self) -> NDArray[Any]:
        """An array of the host of the residual's shape and type."""
        return np.broadcast_to(np.zeros((), self._dtype), len(self.residual))

    def saved(self) -> NDArray[Any]:
        """A copy of the residual in the host's memory."""
        copy: NDArray[Any] = self.residual.copy()
        return copy

    def restore(self, residual: NDArray[Any]) -> None:
        """Overwrite the residual."""
        self.residual[:] = residual


@QUIET
def take_mean(codec: Codec, payloads: Sequence[Bytes], mean: Any, decoded: Any) -> None:
    """Overwrite `mean` with that of what payloads hold, added up in their order; `decoded` is overwritten too."""
    add = getattr(codec, "add", None)  # in one pass, or of few elements
    codec.decode(payloads[0], mean, weight=1)
    for payload in payloads[1:]:
        if add is not None:
            add(payload, mean)
        else:
            codec.decode(payload, decoded, weight=1)
            mean += decoded
    if len(payloads) > 1:
        kernels.beside(mean).arrays.divide(mean, len(payloads))
