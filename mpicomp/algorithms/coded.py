"""What methods with a codec share: the residual, the check for NaN, and the worker's half of a step.

A step's first half is every rank's own: p = what feedback makes of the vector and the residual, Q(p) is sent, and the
residual becomes what Q left out. What the ranks' payloads become is the methods' own: `gathered`, `squeezed`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.arrays import aligned_empty, narrow
from mpicomp.algorithms.base import Algorithm, VectorAggregator, Wire
from mpicomp.algorithms.feedback import Feedback
from mpicomp.algorithms.nonfinite import error, flags
from mpicomp.codecs.base import Bytes, Codec, Draw
from mpicomp.kernels.sign import all_finite
from mpicomp.random import Stream

PIECE_ELEMENTS = 1 << 18  # of which encoding and summing take place in the caches


def piece_elements(codec: Codec, n: int, piece_bytes: int) -> int:
    """Longest piece: in bytes what suits the transport, in elements what suits the caches; whole alignments."""
    units = -(-n // codec.alignment)
    unit_bytes = max(1, codec.nbytes(codec.alignment))
    most = min(piece_bytes // unit_bytes, PIECE_ELEMENTS // codec.alignment, units)
    return codec.alignment * max(1, most)


class Worker:
    """Encodes this rank's pieces, and keeps the residual.

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
    ) -> None:
        self.codec, self.step = codec, 0
        self._feedback, self._stream, self._rank = feedback, stream, rank
        self.residual = np.zeros(n if feedback is not None else 0, dtype)
        self._compensated = np.empty(longest if feedback is not None else 0, dtype)
        self._sent = np.empty_like(self._compensated)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        found: np.dtype[Any] = self.residual.dtype
        return found

    def encode(self, part: NDArray[Any], cut: range, payload: Bytes) -> None:
        """Overwrite `payload` with Q of a part of a vector, the elements of `cut`, and what it leaves out of them."""
        draw = Draw(self._stream, self.step, self._rank, 0, cut.start)
        if self._feedback is None:
            self.codec.encode(part, payload, draw=draw)
            return
        compensated, sent = self._compensated[: len(cut)], self._sent[: len(cut)]
        residual = self.residual[cut.start : cut.stop]
        self._feedback.compensate(part, residual, compensated)
        self.codec.encode(compensated, payload, draw=draw)
        self.codec.decode(payload, sent, weight=1)
        self._feedback.keep(part, compensated, sent, residual)


class CodedAggregator(VectorAggregator):
    """Base of aggregators whose ranks send codes; `_exchange` writes the result.

    Parameters
    ----------
    algorithm, comm, n, dtype, vector_id
        As in `Algorithm.start`.
    """

    def __init__(
        self, algorithm: Algorithm, comm: Communicator, n: int, dtype: DTypeLike | str, vector_id: int
    ) -> None:
        super().__init__(algorithm, comm, n, dtype, vector_id)
        self._requests: dict[tuple[int, int], Any] = {}

    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        # looked at first, so that no residual has changed where a rank's vector is bad
        bad = flags(self.comm, not all_finite(values), traffic)
        if bad:
            raise error(self.comm, bad, f"vector {self.vector_id}, step {self.step}")
        self._exchange(values, out, traffic)

    @abstractmethod
    def _exchange(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        """Write the mean of what the ranks send to `out` (uint16 for bfloat16)."""

    def _put(self, part: NDArray[Any], out: NDArray[Any]) -> None:
        """Write float32 or float64 results where they belong, narrowed."""
        if self._wide is None:
            out[:] = part
        else:
            narrow(part, self.dtype, out)


def buffers(sizes: Sequence[int]) -> list[Bytes]:
    """One array of each size, each beginning at a multiple of 64 bytes of one that begins at a page."""
    starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
    whole = aligned_empty(int(starts[-1]), np.uint8)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def coded_wire(codec: Codec, n: int, piece_bytes: int) -> Wire:
    """See `Algorithm.wire`: the same bytes whatever a message's weight."""
    return Wire(codec.nbytes, piece_elements(codec, n, piece_bytes), codec.alignment)
