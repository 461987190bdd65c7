"""Shared selection: all ranks draw the same winner of each element, and only the winners' signs are sent.

Wire format: M ranks have w = ceil(n / 64) words of n signs each, as in `mpicomp.codecs.sign`. A rank's payload is
ceil(w / M) little-endian words of 64 bits for each winner of an element; those of first winners come first. These words
are the rank's rows of all groups, in order (`mpicomp.kernels.cpu.shared_selection`). Column i of a row has the sign of
the element that the rank wins in column i of the group, or 0 where the vector has no such element. Payloads are not
merged: decoding takes those of all ranks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from collectives.annotations import Array
from collectives.arrays import Device
from mpicomp import kernels
from mpicomp.codecs.options import integer
from mpicomp.kernels.streams import BLOCK, GROUP, TILE, Stream, bernoulli_table, source

MOST_RANKS = 1 << 20
ROW = GROUP // 64  # words


@dataclass(frozen=True, slots=True)
class SharedSelection:
    """Sends the signs of one or two winners of each element, drawn uniformly among the ranks.

    Parameters
    ----------
    ranks : int
        M, the number of ranks.
    winners : 1 or 2
        Winners of each element. A single rank is the only winner.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    `Marsit` uses it with ``winners=1`` or 2. Four ranks send a quarter of the signs each:

    >>> import numpy as np
    >>> from mpicomp.codecs import SharedSelection
    >>> from mpicomp.kernels.streams import Stream
    >>> codec = SharedSelection(ranks=4)
    >>> codec.alignment, codec.votes, codec.nbytes(4096), codec.words(4096)
    (4096, 1, 128, 16)
    >>> signs = np.random.default_rng(0).integers(0, 2**63, 64, dtype=np.uint64)  # packed; equal on all ranks here
    >>> selection = codec.bind("cpu", Stream(0, 0, "selection"))
    >>> winners, payloads = selection.reserve(4096), np.empty((4, codec.words(4096)), np.uint64)
    >>> selection.draw(winners, step=0, first=0)
    >>> for rank in range(4):
    ...     selection.encode(signs, rank, winners, payloads[rank])
    >>> result = np.empty(64, np.uint64)
    >>> selection.decode(payloads.reshape(-1), codec.words(4096), winners, [result])
    >>> np.array_equal(result, signs)
    True
    """

    ranks: int
    winners: int = 1

    def __post_init__(self) -> None:
        integer(self, "ranks", 1, MOST_RANKS)
        integer(self, "winners", 1, 2)

    @property
    def votes(self) -> int:
        """Number of signs from which the result of an element is made, and of rows that a rank sends of a group."""
        return min(self.winners, self.ranks)

    @property
    def alignment(self) -> int:
        """Number of elements that chunk boundaries are multiples of: whole groups, and whole blocks of sums.

        It is 512 lcm(M, 8): 4096 for M = 1, 2, 4 and 8, and at most 4096 M, for odd M.
        """
        return math.lcm(GROUP * self.ranks, BLOCK)

    def words(self, n: int) -> int:
        """Return the words of 64 bits that a rank sends of `n` elements for each vote."""
        return -(-n // (64 * self.ranks))

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Return the size of one rank's payload of `n` elements: n / (8 M) bytes per vote, rounded up to whole words.

        `weight` has no effect.
        """
        return 8 * self.votes * self.words(n)

    def bind(self, device: str, stream: Stream) -> Selection:
        """Return the selection by the kernels of `device`, with its own working memory.

        All ranks pass the same `stream`.
        """
        return Selection(self, kernels.of(device), stream)


class Winners(NamedTuple):
    """Winners of a run of elements. Arrays are tensors for a selection on a device."""

    n: int  # elements
    words: int  # of a payload
    labels: Array  # uint64, bit planes of the labels of first winners
    distances: Array | None  # int64[groups], from first to second winners


class SelectionScratch(threading.local):
    """Working memory of a thread for drawing winners and moving signs."""

    def __init__(self, ranks: int) -> None:
        self.drawing, self.moving = np.empty(40 * TILE, np.uint64), np.empty(24 * ranks, np.uint64)


class Selection:
    """Selection on runs of elements by the kernels of a device and a stream that is the same on all ranks."""

    # a run begins at a multiple of `SharedSelection.alignment`, and ends at one or with the vector
    __slots__ = (
        "_kernels", "_last", "_planes", "_rests", "_schedule", "_scratch", "_sources", "_tables", "codec",
    )  # fmt: skip

    def __init__(self, codec: SharedSelection, device_kernels: SimpleNamespace, stream: Stream) -> None:
        self._kernels = device_kernels.shared_selection
        self.codec, ranks = codec, codec.ranks
        draws, odd = _draws(ranks) if codec.votes < ranks else (0, [])
        self._planes = (ranks - 1).bit_length() if draws else 0
        self._sources, self._last = np.array([source(0, s) for s in range(draws)], np.uint64), source(0, draws)
        tables = [bernoulli_table(1, m - 1) for m in odd]
        self._tables = np.array([table for table, _ in tables], np.uint8).reshape(-1, 64)
        self._rests = np.array([rest for _, rest in tables], np.uint64).reshape(-1, 16)
        self._schedule = stream.schedule()
        self._scratch = SelectionScratch(ranks)

    def reserve(self, n: int, device: Device | None = None) -> Winners:
        """Allocate memory for the winners of `n` elements, on the device of the kernels or None: the host."""
        # log2(M) / M bits an element, at most 0.71
        groups, pair = -(-self.codec.words(n) // ROW), self.codec.votes == 2
        words, labels = self.codec.nbytes(n) // 8, self._planes * ROW * groups
        if device is None:
            return Winners(n, words, np.empty(labels, np.uint64), np.ones(groups, np.int64) if pair else None)
        distances = device.zeros(groups, "int64") if pair else None
        if distances is not None:
            device.run(partial(distances.fill_, 1))
        return Winners(n, words, device.zeros(labels, "int64"), distances)

    def draw(self, winners: Winners, step: int, first: int) -> None:
        """Draw the winners of the run that begins at element `first`, and overwrite `winners`."""
        if not self._planes:
            return
        schedule, ranks, work = self._schedule, self.codec.ranks, self._scratch.drawing
        group, at = np.uint64(first // (GROUP * ranks)), np.uint64(step & 0xFFFFFFFF)
        self._kernels.draw_labels(
            schedule, group, at, self._sources, self._tables, self._rests, ranks, work, winners.labels
        )
        if winners.distances is not None:
            self._kernels.draw_distances(schedule, group, at, self._last, ranks, winners.distances)

    def encode(self, bits: Array, rank: int, winners: Winners, payload: Array) -> None:
        """Overwrite the payload, uint64[nbytes(n) / 8], with the packed signs that a rank sends."""
        if len(payload) != winners.words:
            raise self._damage_error(winners, len(payload))
        ranks, planes = self.codec.ranks, self._planes
        work = self._scratch.moving
        # bits: uint64[ceil(n / 64)], packed signs of all elements
        self._kernels.select_rows(bits, winners.labels, planes, winners.distances, rank, ranks, work, payload)

    def decode(self, payloads: Array, stride: int, winners: Winners, bits: Sequence[Array]) -> None:
        """Move the signs of all ranks' payloads, in rank order every `stride` words, to their elements."""
        # One array of uint64[ceil(n / 64)] for each vote; the array that this rank encoded may be one of them.
        ranks, planes, second = self.codec.ranks, self._planes, bits[1] if winners.distances is not None else None
        last = len(payloads) - stride * (ranks - 1)
        if min(last, stride) < winners.words:
            raise self._damage_error(winners, min(last, stride))
        work, distances = self._scratch.moving, winners.distances
        self._kernels.scatter_rows(payloads, stride, winners.labels, planes, distances, ranks, work, bits[0], second)

    def _damage_error(self, winners: Winners, words: int) -> ValueError:
        return ValueError(
            f"{self.codec}: a payload of {winners.n} elements has {winners.words} words, not {words}: it is damaged"
        )


def _draws(ranks: int) -> tuple[int, list[int]]:
    """Return the draws that a label takes, and the odd numbers on the way from M down to 1."""
    odd, draws, m = [], 0, ranks
    while m > 1:
        if m % 2:
            odd.append(m)
        m, draws = m - 1 if m % 2 else m // 2, draws + 1
    return draws, odd
