"""What methods with a codec share: the residual, how ranks agree that a step is good, and the worker's half of it.

A step's first half is every rank's own: p = what feedback makes of the vector and the residual, Q(p) is sent, and the
residual becomes what Q left out. What the ranks' payloads become is the methods' own: `gathered`, `squeezed`.

A step that meets NaN, infinity or an overflow, on whichever rank, gives all ranks the same error and changes nothing.
No pass looks for them beforehand: codecs refuse them while they encode, and the next residual is kept beside the old
one until all ranks have said that they met none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.memory import aligned_empty, narrow, widen
from mpicomp.aggregator.base import Algorithm, VectorAggregator
from mpicomp.aggregator.nonfinite import all_finite_result, error
from mpicomp.codecs.base import Bytes, Codec, Draw
from mpicomp.codecs.error_feedback import ErrorFeedback, Feedback
from mpicomp.kernels.cpu.sign import all_finite
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.sign_merge import SideChannel

LONG_PIECE = 1 << 19  # elements of which encoding and summing take place in the caches
SHORT_PIECE = 1 << 18  # below, each piece's messages and calls take longer than its codec
LEAST_PIECES = 32  # that travel while others are encoded, where they need not be shorter than `SHORT_PIECE`
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


class FeedbackEncoder:
    """Encodes a rank's pieces, and keeps the residual.

    Attributes
    ----------
    residual : ndarray[n], or [0] without feedback
        Of the steps that are done; what this step makes of it takes its place by `commit`.
    failed : bool
        Something was not finite at this step; zeros were sent for it.

    Parameters
    ----------
    codec : Codec
    feedback : Feedback, optional
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
        feedback: Feedback | None,
        n: int,
        dtype: np.dtype[Any],
        longest: int,
        stream: Stream,
        rank: int,
        applied: str | None = None,
    ) -> None:
        self._applied = applied
        self.codec, self.step, self.failed = codec, 0, False
        self._feedback, self._stream, self._rank = feedback, stream, rank
        self.residual, self._next = (np.zeros(n if feedback is not None else 0, dtype) for _ in range(2))
        # some codecs do error feedback themselves, in fewer passes and to the same bits
        itself = isinstance(feedback, ErrorFeedback) and applied is None
        self._encode_keeping = getattr(codec, "encode_keeping", None) if itself else None
        self._compensated = np.empty(longest if feedback is not None and self._encode_keeping is None else 0, dtype)
        self._sent = np.empty_like(self._compensated)
        kind = np.uint16 if applied == "bfloat16" else applied
        self._rounded = np.empty(0 if applied is None else self._sent.size, kind)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        found: np.dtype[Any] = self.residual.dtype
        return found

    def begin(self, step: int) -> None:
        """Go to another step."""
        self.step, self.failed = step, False

    def encode(self, part: NDArray[Any], cut: range, payload: Bytes) -> None:
        """Overwrite `payload` with Q of a part of a vector, the elements of `cut`, and keep what it leaves out."""
        draw = Draw(self._stream, self.step, self._rank, 0, cut.start)
        if self._feedback is None:
            self._write(part, payload, draw)
            return
        residual, following = (whole[cut.start : cut.stop] for whole in (self.residual, self._next))
        if self._encode_keeping is not None:
            try:
                self._encode_keeping(part, residual, payload, following)
            except ValueError:
                self._refused(following, payload, draw)
            return
        compensated, sent = self._compensated[: len(cut)], self._sent[: len(cut)]
        self._feedback.compensate(part, residual, compensated)
        self._write(compensated, payload, draw, sent)
        if self._applied is not None:
            rounded = self._rounded[: len(cut)]
            narrow(sent, self._applied, rounded)
            widen(rounded, self._applied, sent)
        if not self._feedback.keep(part, compensated, sent, residual, following):
            self.failed = True

    def _write(self, values: NDArray[Any], payload: Bytes, draw: Draw, sent: NDArray[Any] | None = None) -> None:
        """Encode, and overwrite `sent`, if there is one, with what others will decode."""
        try:
            telling = getattr(self.codec, "encode_telling", None)
            if sent is not None and telling is not None:
                telling(values, payload, sent, draw=draw)
                return
            self.codec.encode(values, payload, draw=draw)
        except ValueError:
            self._refused(values, payload, draw)
        if sent is not None:
            self.codec.decode(payload, sent, weight=1)

    def _refused(self, values: NDArray[Any], payload: Bytes, draw: Draw) -> None:
        """The codec raised: over values that are not finite zeros are sent instead."""
        if all_finite(values):
            raise
        # the others wait for a payload that they can decode, and are told at the end
        self.failed = True
        self.codec.encode(np.zeros_like(values), payload, draw=draw)

    def commit(self) -> None:
        """The step is good on all ranks: its residual is the next step's."""
        self.residual, self._next = self._next, self.residual


class CodedAggregator(VectorAggregator):
    """Base of aggregators whose ranks send codes; `_exchange` writes the result, by `_put`, and calls `_tell`.

    Parameters
    ----------
    algorithm, comm, n, dtype, vector_id
        As in `Algorithm.start`.
    """

    def __init__(
        self, algorithm: Algorithm, comm: Communicator, n: int, dtype: DTypeLike | str, vector_id: int
    ) -> None:
        super().__init__(algorithm, comm, n, dtype, vector_id)
        self._requests = comm.persistent(self)
        self._side_channel = SideChannel(comm, 1)
        self._values: NDArray[Any] = np.empty(0)
        self._out: NDArray[Any] = np.empty(0)
        self._finite = True  # this step's result, which is the same on all ranks

    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        if not self.n:
            return
        self._values, self._out, self._finite = values, out, True
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # looked for, and told
                self._exchange(values, traffic)
        finally:
            self._values = self._out = np.empty(0)  # the caller's are his to free
        self._side_channel.collect(traffic)
        said, where = self._side_channel.everyones[:, 0], f"vector {self.vector_id}, step {self.step}"
        bad = tuple(int(rank) for rank in np.flatnonzero(said == _BAD))
        if bad or said.any() or not self._finite:
            raise error(self.comm, bad, where)
        for one in self._workers():
            one.commit()

    @abstractmethod
    def _exchange(self, values: NDArray[Any], traffic: Traffic) -> None:
        """Put the mean of what the ranks send."""

    @abstractmethod
    def _workers(self) -> tuple[FeedbackEncoder, ...]:
        """All that keep a residual; the first encodes this rank's own vector."""

    def _tell(self) -> None:
        """Send the others what became of this rank's encoding; all of it is done."""
        mine, *others = (one.failed for one in self._workers())
        bad = mine and not all_finite(self._values)  # else finite numbers overflowed
        self._side_channel.mine[0] = _BAD if bad else _OVERFLOWED if mine or any(others) else _GOOD
        self._side_channel.start()

    def _put(self, cut: range, decode: Callable[[NDArray[Any]], object], spare: NDArray[Any]) -> None:
        """Let `decode` write results where they belong; those of 16 bits it writes, wide, into `spare`."""
        out = self._out[cut.start : cut.stop]
        if self._wide is None:
            decode(out)
        else:
            part = spare[: len(cut)]
            decode(part)
            narrow(part, self.dtype, out)
        if not all_finite_result(out, self.dtype):
            self._finite = False


def take_mean(codec: Codec, payloads: Sequence[Bytes], mean: NDArray[Any], decoded: NDArray[Any]) -> None:
    """Overwrite `mean` with that of what payloads hold, added up in their order; `decoded` is overwritten too."""
    add = getattr(codec, "add", None)  # in one pass, or of few elements
    codec.decode(payloads[0], mean, weight=1)
    for payload in payloads[1:]:
        if add is not None:
            add(payload, mean)
        else:
            codec.decode(payload, decoded, weight=1)
            np.add(mean, decoded, out=mean)
    np.divide(mean, mean.dtype.type(len(payloads)), out=mean)


def buffers(sizes: Sequence[int]) -> list[Bytes]:
    """One array of each size, each beginning at a multiple of 64 bytes of one that begins at a page."""
    starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
    whole = aligned_empty(int(starts[-1]), np.uint8)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
