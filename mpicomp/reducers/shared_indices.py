"""What methods share whose ranks all send the same elements: few values, summed on the way like a dense vector.

    I      = places that all ranks know
    v      = mean over ranks of (m + g)[I]                           a dense all-reduce of len(I) values
    m      <- (1 - beta) m + beta (m + g), but (1 - beta) m at I     for beta = 1: m + g, but exactly 0 at I
    result = v at I, 0 elsewhere

m is the residual ("memory"), g this rank's vector. Where I comes from is the method's: a `Chooser`.

Nothing is changed before all ranks are known to hold finite numbers, and their mean to be one. The residual is made and
the result filled with zeros while the values travel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.dense.payload import SIXTEEN_BIT
from collectives.memory import aligned_empty
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.base import Aggregator, MessageModel, StateKind, Synchronize, VectorAggregator
from mpicomp.codecs.options import MOST_ELEMENTS, integer, number
from mpicomp.codecs.scale_groups import padded_lengths
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.codecs.top_k import index_bits, kept
from mpicomp.kernels.cpu.sign import all_finite
from mpicomp.kernels.cpu.sparse import pick, put, remember
from mpicomp.reducers.meanwhile import MeanMeanwhile
from mpicomp.reducers.sign_merge import SideChannel

PART_ELEMENTS = 1 << 18  # that one piece of work takes, at most where chunks allow it
BRIEF_ELEMENTS = 1 << 18  # up to here work takes less than keeping account of pieces
_GOOD, _LARGE, _OVERFLOWED, _BAD = range(4)  # what a rank says of its numbers


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
    """Cut tensor_lengths into parts.

    Parameters
    ----------
    lengths : sequence of int
        Elements of each segment; they follow each other.
    rates : sequence of int
        Of each.
    chunk : int, optional
        None: of each segment its rate.
    exact : bool
        A segment is one chunk, whatever its length.
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


class Chooser(Protocol):
    """Where indices come from."""

    def choose(
        self, step: int, values: NDArray[Any], residual: NDArray[Any], places: NDArray[np.int64], traffic: Traffic
    ) -> bool:
        """Overwrite `places` with what all ranks send at this step, each part's within it; collective.

        Returns
        -------
        bool
            Whether all of this rank's values + residual is finite.
        """
        ...


@dataclass(frozen=True)
class SharedIndices(ABC):
    """Options that these methods have in common.

    Parameters
    ----------
    rate : int
        Elements of the vector per element that is sent.
    beta : float
        In (0, 1]: how much of this step's rest goes into the residual (a low-pass filter below 1).
    warmup_steps : int
        So many steps at the beginning are dense and leave no residual.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    rate: int = 100
    beta: float = 1.0
    warmup_steps: int = 0

    synchronize: ClassVar[Synchronize] = "gradients"

    @property
    def uses_tensor_lengths(self) -> bool:
        """See `Algorithm.uses_tensor_lengths`."""
        return False

    def __post_init__(self) -> None:
        integer(self, "rate", 1, MOST_ELEMENTS)
        number(self, "beta", "above 0 and at most 1", lambda beta: 0 < beta <= 1)
        integer(self, "warmup_steps", 0)

    @abstractmethod
    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> Aggregator:
        """See `Algorithm.start`."""

    @abstractmethod
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`."""


def shared_wire(n: int, dtype: str, ranks: int, piece_bytes: int, chunk: int, keep: int, bits: int) -> MessageModel:
    """See `Algorithm.message_model`: `bits` of an index that goes once to every rank are spread over both phases."""
    summing = 8 if dtype == "float64" else 4
    complete = 2 if dtype in SIXTEEN_BIT else summing
    spread = bits * ranks / (16 * (ranks - 1)) if ranks > 1 else 0.0

    def nbytes(elements: int, weight: int) -> int:
        found = kept(elements, chunk, keep)
        return (complete if weight == ranks else summing) * found + math.ceil(spread * found)

    alignment = math.lcm(chunk, 64)
    return MessageModel(nbytes, max(1, piece_bytes * chunk // (keep * summing) // alignment) * alignment, alignment)


class SharedIndicesAggregator(VectorAggregator):
    """Residual and buffers for one vector.

    Parameters
    ----------
    options : SharedIndices
    comm, n, dtype, vector_id, tensor_lengths
        As in `Algorithm.start`.
    rates : sequence of int
        Of each segment; a single one: of the whole vector, whatever its tensor_lengths.
    chunk, exact
        As in `lay_out`.

    Attributes
    ----------
    residual : ndarray[n]
        float32 or float64.
    parts : tuple of Part
    places : int64[k]
        Elements that the last step but dense ones sent.
    """

    state_kinds: ClassVar[dict[str, StateKind]] = {**VectorAggregator.state_kinds, "residual": "mean"}

    def __init__(
        self,
        options: SharedIndices,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
        rates: Sequence[int],
        chunk: int | None,
        exact: bool = False,
    ) -> None:
        super().__init__(options, comm, n, dtype, vector_id, tensor_lengths)
        self.options = options
        lengths = [n] if len(rates) == 1 else padded_lengths(tensor_lengths, n)[1].tolist()
        if len(rates) != len(lengths):
            raise ValueError(f"vector {vector_id} has {len(lengths)} tensors, but rates has {len(rates)} for it")
        self.parts = lay_out(lengths, rates, chunk, exact)
        count = self.parts[-1].last if self.parts else 0
        self.residual = np.zeros(n, self._compute)
        self.places = np.zeros(count, np.int64)
        self._chooser: Chooser | None = None
        kind = self._compute.type
        whole = float(options.beta) == 1.0
        self._past: Any = None if whole else kind(1 - options.beta)
        self._part: Any = None if whole else kind(options.beta)
        self._kept = None if whole else np.empty(count, kind)
        largest = min(float(np.finfo(kind).max) / comm.size, nonfinite.largest(self.dtype))
        self._limit = kind(0.99 * largest)  # sums and means of such numbers are finite
        self._values = aligned_empty(count, kind)
        self._means = aligned_empty(count, UNSIGNED[self._result_dtype.itemsize])
        self._side_channel = SideChannel(comm, 1)
        self._brief = n <= BRIEF_ELEMENTS or comm.size == 1
        self._mean: MeanMeanwhile | None = None

    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        if self.step < self.options.warmup_steps:
            self._dense(values, out, traffic)
            return
        assert self._chooser is not None
        finite = self._chooser.choose(self.step, values, self.residual, self.places, traffic)
        start = traffic.clock()
        within = pick(values, self.residual, self.places, self._limit, self._past, self._values, self._kept)
        said = _GOOD if within else _LARGE
        if not finite:  # of values + residual: finite numbers may have overflowed
            said = _OVERFLOWED if all_finite(values) else _BAD
        self._side_channel.mine[0] = said
        self._side_channel.start()
        traffic.seconds_encoding += traffic.clock() - start
        traffic.seconds_total += traffic.clock() - start
        means = self._means.view(self._result_dtype)
        work = self._meanwhile(values, out, traffic)
        if self._brief:
            self.comm.dense(self._values, self.dtype, True, means, traffic)
            start = traffic.clock()
            for _ in work:
                pass
            traffic.seconds_total += traffic.clock() - start
        else:
            if self._mean is None:
                self._mean = MeanMeanwhile(self.comm, self._values, self.dtype, means)
            self._mean.run(work, traffic)
        self._complete(values, out, traffic)

    def _meanwhile(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> Iterator[None]:
        """What is done while values travel: zeros where the result will be, and the residual if all is well."""
        clock, trace = traffic.clock, self.comm.trace
        for part in self.parts:
            start = clock()
            out[part.elements] = 0
            end = clock()
            traffic.seconds_decoding += end - start
            if trace is not None:
                trace.phases(decode=(start, end))
            yield
        self._side_channel.collect(traffic)
        if self._side_channel.everyones.max() == _GOOD:
            yield from self._renew_residual(values, traffic)

    def _renew_residual(self, values: NDArray[Any], traffic: Traffic) -> Iterator[None]:
        clock, trace = traffic.clock, self.comm.trace
        for part in self.parts:
            start = clock()
            some = part.elements
            kept_values = None if self._kept is None else self._kept[part.values]
            among = self.places[part.values]
            remember(values[some], self.residual[some], self._past, self._part, part.start, among, kept_values)
            end = clock()
            traffic.seconds_encoding += end - start
            if trace is not None:
                trace.phases(encode=(start, end))
            yield

    def _complete(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        """Put the means where they belong, unless a rank's numbers, or they themselves, are none."""
        said = self._side_channel.everyones[:, 0]
        where = f"vector {self.vector_id}, step {self.step}"
        bad = tuple(int(rank) for rank in np.flatnonzero(said == _BAD))
        if bad or (said == _OVERFLOWED).any():
            raise nonfinite.error(self.comm, bad, where)
        start = traffic.clock()
        # small numbers cannot overflow: if their mean is not finite, the sum went wrong, and nobody learns it otherwise
        if not nonfinite.all_finite_result(self._means.view(self._result_dtype), self.dtype):
            raise nonfinite.error(self.comm, (), where)
        if said.any():  # large numbers, of which the mean might have been infinite: the residual is still as it was
            for _ in self._renew_residual(values, traffic):
                pass
        put(self._means, self.places, out.view(self._means.dtype))
        traffic.seconds_decoding += traffic.clock() - start
        traffic.seconds_total += traffic.clock() - start

    def _dense(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        bad = self._wide is not None and not all_finite(values)  # the sums will take a widened copy's place
        self.comm.dense(values, self.dtype, True, out, traffic)
        if not nonfinite.all_finite_result(out, self.dtype):
            bad = bad or (self._wide is None and not all_finite(values))
            nonfinite.raise_non_finite(self.comm, bad, f"vector {self.vector_id}, step {self.step}")

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"residual": self.residual}
