"""One number for a set of messages, whatever the order in which they came."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes

_HEAD = struct.Struct("<qI")


def code(row: int, stamp: int, payload: Bytes) -> int:
    """CRC-32 of a message with its place and visit, so that a message of another example or visit has another code."""
    return zlib.crc32(payload.data, zlib.crc32(_HEAD.pack(row, stamp)))


def together(rows: Any, stamps: Any, codes: Any) -> int:
    """Sum, modulo 2^64, of a 64-bit hash of each message's place, visit and code.

    Sums of the parts of a set add up to that of the whole.
    """
    with np.errstate(over="ignore"):
        place = _mixed(np.asarray(rows, np.int64).view(np.uint64))
        content = np.asarray(stamps, np.uint64) << np.uint64(32) | np.asarray(codes, np.uint64)
        return int(_mixed(place ^ content).sum(dtype=np.uint64))


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Let every bit depend on every other: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
