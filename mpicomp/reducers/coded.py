"""What reducers of codes share: lengths of pieces, buffers, the result, and how ranks agree that a step is good.

A step that meets NaN, infinity or an overflow, on whichever rank, gives all ranks the same error and changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.devices import Landed
from collectives.execution.pipelined import execute
from collectives.execution.program import Program
from collectives.memory import aligned_empty, narrow
from collectives.testable import Testable
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.nonfinite import all_finite_result
from mpicomp.aggregator.parts import Reducer, StateKind, VectorSpec
from mpicomp.codecs.base import Bytes, Codec
from mpicomp.feedback.error_feedback import QUIET, FeedbackEncoder
from mpicomp.reducers.side_channel import SideChannel, bad_ranks

LONG_PIECE = 1 << 19  # elements of which encoding and summing take place in the caches
SHORT_PIECE = 1 << 18  # below, each piece's messages and calls take longer than its codec
LEAST_PIECES = 32  # that travel while others are encoded, where they need not be shorter than `SHORT_PIECE`
BRIEF_ELEMENTS = 1 << 14  # up to here encoding takes less than keeping account of pieces
_GOOD, _OVERFLOWED, _BAD = 0, 1, 2  # what a rank says of its step


def piece_elements(codec: Codec, n: int, piece_bytes: int, back: Codec | None = None) -> int:
    """Longest piece: in bytes what suits the transport, in elements what suits the caches; whole alignments.

    Of two passes with a codec each, neither sends more bytes at once, unless one alignment is more.
    """
    units = -(-n // codec.alignment)
    unit_bytes = max(1, *(one.nbytes(codec.alignment) for one in (codec, back or codec)))
    suitable = min(LONG_PIECE, max(SHORT_PIECE, n // LEAST_PIECES))
    most = min(piece_bytes // unit_bytes, suitable // codec.alignment, units)
    return codec.alignment * max(1, most)


def buffers(sizes: Sequence[int], alignment: int = 64) -> list[Bytes]:
    """One array of each size, each beginning at a multiple of so many bytes of one that begins at a page."""
    starts = np.cumsum([0, *(-(-size // alignment) * alignment for size in sizes)]).tolist()
    whole = aligned_empty(starts[-1], np.uint8)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def after(done: Testable | None, then: Callable[[], object]) -> Testable | None:
    """Do something once a device has done its part, or at once if it has none; tells when that is over."""
    if done is not None:
        return Landed(done, then)
    then()
    return None


class Payloads:
    """Payloads of pieces.

    Parameters
    ----------
    codec : Codec
    lengths : sequence of int
        Elements of each.

    Attributes
    ----------
    codec : Codec
        What encodes to `there`, and decodes from it.
    there : list
        The payloads where the vector is.
    host : list of uint8 arrays
        The payloads where they are sent from and received: here the same.
    """

    def __init__(self, codec: Codec, lengths: Sequence[int]) -> None:
        self.codec = codec
        self.host = self.there = buffers([codec.nbytes(n) for n in lengths])

    def fetch(self, piece: int) -> Testable | None:
        """Have `host` be what `there` is; tells when it is. What the encoder found out is known by then."""
        return None

    def deliver(self, piece: int) -> None:
        """Have `there` be what `host` is, for what is decoded from now on."""


class Scratch(threading.local):
    """A thread's memory for the mean of a piece, and for what it is a mean of."""

    def __init__(self, longest: int, dtype: np.dtype[Any]) -> None:
        self.mean, self.decoded = np.empty(longest, dtype), np.empty(longest, dtype)


Decode = Callable[[Any, Any], object]
"""Overwrites a piece of the result, float32 or float64, and as many elements of working memory."""


class Results:
    """Where the results of pieces go. Several threads may write at once, each another piece.

    Parameters
    ----------
    spec : VectorSpec
    longest : int
        Elements of the longest piece.

    Attributes
    ----------
    scratch : Scratch
        Memory of the host for means.
    finite : bool
        Whether the step's result is: the same on all ranks.
    """

    def __init__(self, spec: VectorSpec, longest: int) -> None:
        self._dtype, self._narrow = spec.dtype, spec.sixteen_bit
        self.scratch = Scratch(longest, spec.compute)
        self._finite, self._out = True, None

    @property
    def finite(self) -> bool:
        """See the attributes."""
        return self._finite

    def begin(self, out: Any) -> None:
        """Go to another result; None: drop the reference to it."""
        self._out, self._finite = out, True

    @QUIET
    def write(self, cut: range, decode: Decode) -> Testable | None:
        """Let `decode` write a piece, which is rounded where the result has 16 bits; tells when it is there."""
        out, scratch = self._out[cut.start : cut.stop], self.scratch  # type: ignore[index]
        if self._narrow:
            part = scratch.mean[: len(cut)]
            decode(part, scratch.decoded[: len(cut)])
            narrow(part, self._dtype, out)
        else:
            decode(out, scratch.decoded[: len(cut)])
        if not all_finite_result(out, self._dtype):
            self._finite = False
        return None


class CodedPayload:
    """What payloads of codes have in common: the pieces of a vector, and where the results of pieces go.

    Pieces may be encoded, merged and finished by several threads at once.
    """

    def __init__(self, spec: VectorSpec, cuts: Sequence[range], results: Results) -> None:
        self.brief = spec.n <= BRIEF_ELEMENTS
        self._cuts, self._arrived, self._results = cuts, [0] * len(cuts), results
        self._counting, self._values = threading.Lock(), None

    @property
    def finite(self) -> bool:
        """Whether the step's result is finite: the same on all ranks."""
        return self._results.finite

    def begin(self, values: Any, out: Any) -> None:
        """Go to another vector and result."""
        self._values, self._arrived = values, [0] * len(self._cuts)
        self._results.begin(out)

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        self._values = None
        self._results.begin(None)

    def _part(self, cut: range) -> Any:
        """A piece of this rank's vector."""
        return self._values[cut.start : cut.stop]  # type: ignore[index]

    def _complete_by(self, piece: int, awaited: int) -> bool:
        """Take note that one more rank's code of a piece is there; whether so many are."""
        with self._counting:
            self._arrived[piece] += 1
            return self._arrived[piece] == awaited


class Residuals:
    """The residuals of a rank's encoders; see `Feedback`.

    Parameters
    ----------
    encoders : dict
        By the keys of the state. The first encodes this rank's own vector.
    state_kinds : dict
        Of the keys.
    """

    state_nan: ClassVar[str] = ""

    def __init__(self, encoders: dict[str, FeedbackEncoder], state_kinds: dict[str, StateKind]) -> None:
        self.encoders, self.state_kinds = encoders, state_kinds

    @property
    def residual(self) -> Any:
        """The error of this rank's own encoding, where the vector is: [n], or [0] without feedback."""
        return next(iter(self.encoders.values())).residual

    def check_ready(self) -> None:
        """See `Feedback`: always ready."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of the residuals."""
        return {key: encoder.saved() for key, encoder in self.encoders.items()}

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        return {key: encoder.like for key, encoder in self.encoders.items()}

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        for key, encoder in self.encoders.items():
            encoder.restore(state[key])
        return ""


class CodedRounds(Reducer):
    """A step of methods whose ranks send codes; see `Reducer`.

    Parameters
    ----------
    tell_at_once : bool
        Only what is encoded of this rank's own vector may fail, so the ranks can tell each other as soon as that is
        done; False: owners then encode what others have sent.
    persistent : bool
        Whether messages are of the same lengths at every step.
    """

    def __init__(
        self,
        comm: Communicator,
        errors: Residuals,
        program: Program,
        payload: Any,  # a `Payload` as well
        tell_at_once: bool,
        persistent: bool = False,
    ) -> None:
        self._encoders = tuple(errors.encoders.values())
        self.program, self._payload, self._tag, self._tell_at_once = program, payload, comm.fixed_tag(), tell_at_once
        self._requests = comm.persistent(self) if persistent else None
        self._side_channel = SideChannel(comm, 1)

    def commit(self) -> None:
        """See `Reducer`."""
        for encoder in self._encoders:
            encoder.commit()
        self.roll_back()

    def roll_back(self) -> None:
        """See `Reducer`."""
        self._payload.end()

    def undo(self) -> None:
        """See `Reducer`."""
        for encoder in self._encoders:
            encoder.undo()

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
        if not call.spec.n:
            return
        for encoder in self._encoders:
            encoder.begin(call.step)
        payload, values = self._payload, call.values
        payload.begin(values, call.out)
        at_once = partial(self._tell, values) if self._tell_at_once else None
        made = payload, self._tag, call.traffic, at_once, self._requests
        yield from execute(call, self.program, *made)
        if at_once is None:
            self._tell(values)
        channel = self._side_channel
        yield from channel.collect(call, call.traffic)
        said = channel.everyones[:, 0]
        if said.any() or not payload.finite:
            bad, overflowed = bad_ranks(said == _BAD), bad_ranks(said == _OVERFLOWED)
            why = getattr(self._encoders[0].codec, "out_of_range", "")
            raise call.out_of_range(overflowed, why) if why and overflowed and not bad else call.non_finite(bad)

    def _tell(self, values: Any) -> None:
        """Send the others what became of encoding this rank's vector; all of it is done."""
        mine, *others = (encoder.failed for encoder in self._encoders)
        bad = mine and not self._encoders[0].all_finite(values)  # else finite numbers overflowed
        self._side_channel.mine[0] = _BAD if bad else _OVERFLOWED if mine or any(others) else _GOOD
        self._side_channel.start()
