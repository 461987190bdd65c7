"""The majority of votes: signs without a residual, complete counts decided by coins where they tie, and +-1."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.memory import narrow
from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.codecs.sign import UNSIGNED, Sign
from mpicomp.codecs.vote_counts import planes_of
from mpicomp.feedback.scaled_votes import STREAMING_ELEMENTS
from mpicomp.kernels.streams import GROUP, Stream, source

COMMON = source(0)  # where coins come from that all ranks draw alike


class _Coins(threading.local):
    """A thread's memory for the coins of a piece."""

    def __init__(self, longest: int) -> None:
        self.words = np.empty(8 * -(-longest // GROUP), np.uint64)


class MajorityCodec:
    """One vector's votes.

    Parameters
    ----------
    pieces : sequence of range
        Elements of each piece.
    dtype : str
        Of the vector.
    ranks : int
    stream : Stream
        Of the coins.
    counts : list of uint64 arrays
        Per piece, the counts that votes are written to.
    device : str
        Where vectors are; counts are in the host's memory.

    Attributes
    ----------
    finite : bool
        Whether what was encoded at this step is.
    """

    def __init__(
        self,
        pieces: Sequence[range],
        dtype: str,
        ranks: int,
        stream: Stream,
        counts: list[NDArray[np.uint64]],
        device: str = "cpu",
    ) -> None:
        of_device, of_host = kernels.of(device), kernels.of("cpu")  # which decides, whatever the device
        self._pack, self._unpack = of_device.sign.pack, of_device.sign.unpack
        self._majority, self._random = of_host.vote_counts.majority, Sign().bind("cpu", stream)
        self._pieces, self._ranks, self._counts = pieces, ranks, counts
        self._n = pieces[-1].stop if pieces else 0
        self._words = [-(-len(cut) // 64) for cut in pieces]
        kind = np.dtype(np.float64 if dtype == "float64" else np.float32).type
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        longest = max(map(len, pieces), default=0)
        self._coins = _Coins(longest) if ranks % 2 == 0 else None
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        self._result_words = UNSIGNED[stored.itemsize]
        ones = np.zeros(2, stored)
        narrow(np.array([1, -1], np.float32), dtype, ones)
        self._plus, self._minus = ones.view(self._result_words)
        self.finite = True
        self._nothing: Any = np.empty(0)
        self._streaming = False
        self.end()

    def begin(self, step: int, values: Any, out: Any) -> None:
        """Go to another vector and step."""
        self.finite, self._step, self._values = True, step, values
        self._take_out(out)

    def _take_out(self, out: Any) -> None:
        self._out = out.view(self._result_words)
        self._streaming = self._n >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        self._values = self._out = self._nothing

    def encode(self, piece: int) -> Testable | None:
        """Write the signs of this rank's piece; see `SignFeedback`."""
        if not self._encode(piece, self._counts[piece]):
            self.finite = False
        return None

    def _encode(self, piece: int, counts: Any) -> Any:
        """Whether the piece is finite."""
        cut, signs = self._pieces[piece], counts[: self._words[piece]]
        return self._pack(self._values[cut.start : cut.stop], signs, self._step % 2 == 0, *self._constants)

    def decide(self, first: int, counts: NDArray[np.uint64], words: int) -> None:
        """Make complete counts into the majority's signs; the coins know of no rank, so any rank may decide."""
        coins = None
        if self._coins is not None:
            coins = self._coins.words[: 8 * -(-64 * words // GROUP)]
            self._random.draw(first, self._step, COMMON, (1, 1), coins)
        self._majority(counts, planes_of(self._ranks), words, self._ranks // 2, coins, counts)

    def finish(self, piece: int) -> Testable | None:
        """Write +-1 for the majority's signs of a piece; see `SignFeedback`."""
        self._finish(piece, self._counts[piece])
        return None

    def _finish(self, piece: int, counts: Any) -> None:
        cut, signs = self._pieces[piece], counts[: self._words[piece]]
        self._unpack(signs, self._plus, self._minus, self._streaming, self._out[cut.start : cut.stop])
