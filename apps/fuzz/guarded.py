"""Memory in which a kernel's read or write beyond an array ends the process, or is found afterwards."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray, Bytes

CANARY, _CANARY_BYTES = 0xA5, 64
_PAGE = mmap.PAGESIZE


class GuardedMemory:
    """Memory whose end lies at a page that may be neither read nor written.

    Arrays are taken from its end, so that the first byte behind them is a SIGSEGV. Bytes before an array are compared
    with their values when `check` is called.

    Parameters
    ----------
    most_bytes : int
        Size of the largest array.

    Examples
    --------
    >>> from apps.fuzz.guarded import GuardedMemory
    >>> memory = GuardedMemory(1000)
    >>> memory.copy(b"abc").tobytes()
    b'abc'
    >>> memory.check()
    """

    def __init__(self, most_bytes: int) -> None:
        self._size = -(-(most_bytes + _CANARY_BYTES) // _PAGE) * _PAGE
        self._map = mmap.mmap(-1, self._size + _PAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self._bytes.ctypes.data + self._size)
        if libc.mprotect(address, ctypes.c_size_t(_PAGE), 0):
            raise OSError(ctypes.get_errno(), "a page cannot be protected")
        self._start = self._size

    def empty(self, n: int, dtype: DTypeLike) -> AnyArray:
        """Return an array, filled with a pattern, that takes the place of the last one."""
        nbytes = n * np.dtype(dtype).itemsize
        self._start = self._size - nbytes
        self._bytes[self._start - _CANARY_BYTES : self._size] = CANARY
        return self._bytes[self._start : self._size].view(dtype)

    def copy(self, content: bytes | Bytes) -> Bytes:
        """Return a copy of bytes, which takes the place of the last array."""
        made = self.empty(len(content), np.uint8)
        made[:] = np.frombuffer(content, np.uint8)
        return made

    def check(self) -> None:
        """Raise AssertionError if the bytes before the array have changed."""
        before = self._bytes[self._start - _CANARY_BYTES : self._start]
        if (before != CANARY).any():
            raise AssertionError("bytes before an array were written to")
