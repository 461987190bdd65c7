"""Values of vote counts: a factor times the sum of the ranks' signs, each scale group of the vector with its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.memory import SIXTEEN_BIT, aligned_empty, narrow, widen
from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.codecs.vote_counts import write_values
from mpicomp.feedback.error_feedback import KeptArrays
from mpicomp.feedback.scale_groups import ScaleGroups

STREAMING_ELEMENTS = 4 << 20  # vectors this long are written past the caches


class ScaledVotes(KeptArrays):
    """What EF-signSGD's and SSDM's feedback share: one vector's values.

    Parameters
    ----------
    groups : ScaleGroups
    pieces : sequence of range
        Elements of each piece.
    dtype : str
        Of the result.
    ranks : int
    device : str
        Where vectors are; counts are in the host's memory.
    """

    def __init__(
        self, groups: ScaleGroups, pieces: Sequence[range], dtype: str, ranks: int, device: str = "cpu"
    ) -> None:
        self._kernels = kernels.of(device)
        self.groups, self._pieces, self._dtype, self._ranks = groups, pieces, dtype, ranks
        self._n = pieces[-1].stop if pieces else 0
        self._spans = [groups.span(cut) for cut in pieces]
        self._sums = self._host_sums = self._zeros(groups.blocks, np.float64)  # room for what scales are made of
        kind = np.float64 if dtype == "float64" else np.float32
        self._factors: NDArray[Any] = np.zeros(groups.starts.size, kind)  # of this step
        self._narrow = dtype in SIXTEEN_BIT
        self._nothing: Any = np.empty(0, kind)
        self._counts: list[Any] = []
        self._streaming = False
        self.end()

    @staticmethod
    def _zeros(n: int, dtype: Any) -> Any:
        """Memory for what kernels work on."""
        zeros = aligned_empty(n, dtype)
        zeros[:] = 0
        return zeros

    def lay_out(self, counts: Sequence[NDArray[np.uint64]]) -> None:
        """Use a reducer's counts of each piece."""
        self._counts = [*counts]

    def begin(self, values: Any, out: Any, wide: Any) -> None:
        """Go to another vector, and write to `out`.

        16-bit results are made in float32 in `wide`, of which a piece may be overwritten by then.
        """
        self._values, self._target = values, out if wide is None else wide
        self._take_out(out)

    def _take_out(self, out: Any) -> None:
        self._out = out
        self._streaming = not self._narrow and self._n >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0

    @staticmethod
    def all_finite(values: Any) -> bool:
        """Whether a vector in the type of computing has neither NaN nor infinity."""
        return bool(kernels.of("cpu").sign.all_finite(values))

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        self._values = self._out = self._target = self._nothing

    def finish(self, piece: int) -> Testable | None:
        """Write the values of a piece's complete counts; see `SignFeedback`."""
        cut, words = self._pieces[piece], self._words(piece)
        target = self._target[cut.start : cut.stop]
        where = self.groups.starts, self.groups.stops, cut.start, *self._spans[piece]
        write_values(self._counts[piece], words, self._ranks, self._factors, where, self._streaming, target)
        if self._narrow:
            narrow(target, self._dtype, self._out[cut.start : cut.stop])
        return None

    def _words(self, piece: int) -> int:
        """Words of a plane of a piece's counts."""
        return -(-len(self._pieces[piece]) // 64)

    def _representable(self) -> bool:
        """Whether the largest result, where all ranks have one sign, is finite in the results' type."""
        with np.errstate(over="ignore"):
            largest = self._factors * self._factors.dtype.type(self._ranks)
        if self._narrow:
            rounded = np.empty(largest.size, np.uint16 if self._dtype == "bfloat16" else np.float16)
            narrow(largest, self._dtype, rounded)
            widen(rounded, self._dtype, largest)
        return bool(np.isfinite(largest).all())

    # State -----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of the arrays on the host."""
        return {key: self._to_host(getattr(self, key)) for key in self.like()}

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        for key in self.like():
            self._overwrite(getattr(self, key), state[key])
        return ""

    @staticmethod
    def _to_host(vector: Any) -> NDArray[Any]:
        """A copy in the host's memory."""
        return np.array(vector)

    @staticmethod
    def _overwrite(vector: Any, values: NDArray[Any]) -> None:
        vector[:] = values
