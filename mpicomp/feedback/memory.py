"""The memory of methods whose ranks all send the same elements, and the layout of what is kept of a vector.

    v      = (m + g)[I]
    m      <- (1 - beta) m + beta (m + g), but (1 - beta) m at I     for beta = 1: m + g, but exactly 0 at I

m is the memory (the residual), g this rank's vector, I the places that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives.memory import aligned_empty
from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.codecs.top_k import index_bits, kept

PART_ELEMENTS = 1 << 18  # that one piece of work takes, at most where blocks allow it


@dataclass(frozen=True, slots=True)
class Part:
    """A run of whole chunks, and where what is kept of them is among all that is.

    Attributes
    ----------
    start, stop : int
        Elements.
    chunk, keep : int
        `keep` of every `chunk` elements are kept.
    first, last : int
        Places among the values.
    """

    start: int
    stop: int
    chunk: int
    keep: int
    first: int
    last: int

    @property
    def elements(self) -> slice:
        """In the vector."""
        return slice(self.start, self.stop)

    @property
    def values(self) -> slice:
        """Among the values that are kept."""
        return slice(self.first, self.last)

    @property
    def bits(self) -> int:
        """Of a place within a chunk."""
        return index_bits(self.chunk)


def lay_out(lengths: Sequence[int], rates: Sequence[int], chunk: int | None, exact: bool = False) -> tuple[Part, ...]:
    """Cut a vector's tensors into parts.

    Parameters
    ----------
    lengths : sequence of int
        Elements of each tensor; the tensors follow each other.
    rates : sequence of int
        The rate of each tensor.
    chunk : int, optional
        None: each tensor's chunks are as long as its rate.
    exact : bool
        A tensor is one chunk, whatever its length.
    """
    parts: list[Part] = []
    start = first = 0
    for length, rate in zip(lengths, rates, strict=True):
        size = max(1, length) if exact else chunk or rate
        keep = max(1, -(-length // rate)) if exact else size // rate
        step = size * max(1, PART_ELEMENTS // size)
        cuts = [*range(start, start + length, step), start + length]
        for begin, end in pairwise(cuts):
            last = first + kept(end - begin, size, keep)
            parts.append(Part(begin, end, size, keep, first, last))
            first = last
        start += length
    return tuple(parts)


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


class Memory(KeptArrays):
    """The residual of one vector, and the values of the places that are sent.

    Parameters
    ----------
    n : int
    compute, stored : dtype
        float32 or float64; and of the result, uint16 for bfloat16.
    parts : tuple of Part
    beta : float
    limit : float
        Sums and means over ranks of numbers up to this are finite.
    device : str

    Attributes
    ----------
    residual : ndarray[n]
    parts : tuple of Part
    runs : tuple of Part
        The same elements in as many pieces as kernels are best given.
    places : int64[k]
        Indices that the last sparse step sent.
    values : ndarray[k]
        Of this rank at these places; in the host's memory, as are the means.
    means : ndarray[k]
        Of the ranks, as unsigned words of the result's size; `stored_means` are the same in the result's type.
    finite, within : bool
        Whether all that was checked since `begin` was finite, and what was picked within the limit; of the time when
        `pick` is done.
    """

    def __init__(
        self,
        n: int,
        compute: np.dtype[Any],
        stored: np.dtype[Any],
        parts: tuple[Part, ...],
        beta: float,
        limit: float,
        device: str = "cpu",
    ) -> None:
        self._kernels = kernels.of(device)
        self.parts = self.runs = parts
        count = parts[-1].last if parts else 0
        kind = compute.type
        self.dtype = compute
        self.residual, self._next = self._zeros(n, compute), self._zeros(n, compute)
        self._renewed = self._summed = False
        self.places = self._zeros(count, np.int64)
        whole = float(beta) == 1.0
        self._past: Any = None if whole else kind(1 - beta)
        self._gain: Any = None if whole else kind(beta)
        self._kept = None if whole else self._zeros(count, compute)
        self._limit = kind(limit)
        self.values, self.means = self._crossing(count, compute), self._crossing(count, UNSIGNED[stored.itemsize])
        self.stored_means = self.means.view(stored)
        self.finite = self.within = True

    @staticmethod
    def _zeros(n: int, dtype: Any) -> Any:
        """Memory for what kernels work on."""
        return np.zeros(n, dtype)

    @staticmethod
    def _crossing(n: int, dtype: Any) -> NDArray[Any]:
        """Memory of the host for what travels."""
        return aligned_empty(n, dtype)

    # Before values travel --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Look at another vector."""
        self.finite, self._summed = True, False

    def check(self, part: Part, vector: Any) -> None:
        """Take note of whether vector + residual is finite in a part."""
        some = part.elements
        if not self._kernels.sparse.finite_sum(vector[some], self.residual[some], self.sums(some)):
            self.finite = False

    def sums(self, some: slice) -> Any:
        """Where vector + residual goes that is looked at, so that `renew` need not add again; None: nowhere.

        It is asked for all elements of a vector or for none.
        """
        if self._past is not None:
            return None
        self._summed = True
        return self._next[some]

    def all_finite(self, vector: Any) -> bool:
        """Whether a vector is finite, without the residual."""
        return bool(self._kernels.sign.all_finite(vector))

    def place(self, part: Part, indices: Any) -> None:
        """Set the places of a part to these indices within its blocks."""
        places = self.places[part.values]
        self._kernels.sparse.expand(indices, part.chunk, part.keep, part.start, part.stop, places)

    def draw_places(self, part: Part, schedule: NDArray[np.uint64], step: np.uint64, source: np.uint64) -> None:
        """Draw the places of a part, one of each block."""
        places = self.places[part.values]
        self._kernels.sparse.draw_strata(schedule, part.first, step, source, part.chunk, part.start, part.stop, places)

    def pick(self, vector: Any) -> Testable | None:
        """Take the values at the places; tells when they are there, and what `finite` and `within` are."""
        self.within = bool(self._pick(vector, self.values))
        return None

    def _pick(self, vector: Any, values: Any) -> Any:
        picked = vector, self.residual, self.places, self._limit, self._past, values, self._kept
        return self._kernels.sparse.pick(*picked)

    # While they travel -----------------------------------------------------------------------------------------------

    @property
    def shares(self) -> Sequence[Part]:
        """The whole vector, in as many parts as are cleared and renewed at a time."""
        return self.parts

    def clear(self, out: Any, share: Part) -> None:
        """Fill a share of the result with zeros; `settled` tells when a device has."""
        out[share.elements] = 0

    def renew(self, vector: Any, share: Part) -> None:
        """Make a share of the residual of the next step; once all are made, `commit` puts it into force."""
        self._remember(vector, share.start, share.elements, share.values)
        self._renewed = True

    def _remember(self, vector: Any, start: int, some: slice, values: slice) -> None:
        kept_values = None if self._kept is None else self._kept[values]
        old, scales, among = self.residual[some], (self._past, self._gain), self.places[values]
        x = None if self._summed else vector[some]
        self._kernels.sparse.remember(x, old, *scales, start, among, kept_values, self._next[some])

    def settled(self) -> Testable | None:
        """What tells when nothing is written to the result any more."""
        return None

    # Afterwards ------------------------------------------------------------------------------------------------------

    def scatter(self, out: Any) -> Testable | None:
        """Write the means to their places; tells when the result is there."""
        self._kernels.sparse.put(self.means, self.places, out.view(self.means.dtype))
        return None

    def commit(self) -> None:
        """Go over to the residual that `renew` has made, if it was called."""
        if self._renewed:
            self.residual, self._next, self._renewed = self._next, self.residual, False

    def roll_back(self) -> None:
        """Keep the residual of before."""
        self._renewed = False
