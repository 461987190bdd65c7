"""Buckets, levels and working memory of the kernels of `mpicomp.codecs.Levels`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.annotations import AnyArray, Array, Bytes
from collectives.arrays.elements import aligned_empty
from mpicomp import kernels

Own = tuple[Array, Array | None] | None
"""A vector, and its residual if it has one."""
MAGNITUDES = {
    2: (0.7979,),
    3: (1.2240,),
    4: (0.4528, 1.5104),
    8: (0.2451, 0.7560, 1.3439, 2.1520),
    16: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7327),
    256: (1.0,),
}
"""Positive levels, of a Gaussian with deviation 1; 3 levels have 0 besides, and 256 are steps."""
_THRESHOLDS = {3: (0.6120,), 4: (0.9816,), 8: (0.5006, 1.0500, 1.7480)}


class Buckets(NamedTuple):
    """Buckets of a vector: first elements and lengths, and where the codes of each begin, in bytes."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    there: tuple[Array, ...] = ()  # the same three on the device that holds the vector

    def on(self, to_device: Callable[[AnyArray], Array]) -> Buckets:
        """Return them with copies of the three on a device."""
        return self._replace(there=tuple(map(to_device, self[:3])))

    def part(self, cut: range) -> Buckets:
        """Return some of the buckets; places still count from the first of all."""

        def some(tables: Sequence[Array]) -> list[Array]:
            return [of_all[cut.start : cut.stop + extra] for of_all, extra in zip(tables, (0, 0, 1), strict=False)]

        starts, lengths, places = some(self[:3])
        return Buckets(starts, lengths, places, tuple(some(self.there)))

    @classmethod
    def of(cls, starts: Array, lengths: Array, nbytes: Array) -> Buckets:
        """Return buckets, given also the bytes of each one's codes."""
        places = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(nbytes, out=places[1:])
        return cls(np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(lengths, np.int64), places)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        codes = int(self.places[-1] - self.places[0])
        return codes + codes % 2 + 2 * len(self.starts)

    def views(self, payload: Bytes | None, word: str, writes: bool = False) -> tuple[Array, Array]:
        """Return codes, of the type `word`, and scales of a payload; `writes`: clear the byte between them."""
        if payload is None:
            return None, None
        end, at = int(self.places[-1] - self.places[0]), len(payload) - 2 * len(self.starts)
        if writes and end < at:
            payload[end:at] = 0  # kernels write whole vectors, up to the end of the codes
        view = kernels.beside(payload).arrays.view
        return view(payload[:end], word), view(payload[at:], "uint16")


class _Scratch(threading.local):
    """A thread's memory for the buckets that a kernel works on."""

    def __init__(self, bucket: int) -> None:
        of_kernels = kernels.of("cpu").levels
        at_once: int = of_kernels.AT_ONCE
        longest = -(-bucket // 64) * 64
        self.work = (
            aligned_empty(at_once * longest, np.float32),
            np.empty(at_once * (2 * longest + 8 * of_kernels.BYTES), np.uint8),
            np.empty(3 * at_once),
        )


@lru_cache(maxsize=32)
def scratch(bucket: int) -> _Scratch:
    """Return the memory of each thread for buckets of up to so many elements."""
    return _Scratch(bucket)


@lru_cache(maxsize=64)
def tables(levels: int) -> tuple[Any, Any, Any]:
    """Return thresholds between magnitudes, magnitudes, and their squares."""
    magnitudes = np.array(MAGNITUDES[levels], np.float32)
    exact = np.array(MAGNITUDES[levels])
    thresholds = np.array(_THRESHOLDS.get(levels, (exact[1:] + exact[:-1]) / 2), np.float32)
    return thresholds.astype(np.float64), magnitudes, magnitudes.astype(np.float64) ** 2
