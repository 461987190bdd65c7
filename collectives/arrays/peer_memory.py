"""Memory of other processes of this host, read in place by a call of the kernel (`process_vm_readv`).

MPI libraries call this cross-memory attach. The kernel allows it among processes of one user, unless a container or the
Yama module forbids it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Generator, Sequence

import numpy as np

from collectives.annotations import AnyArray
from collectives.arrays.shared_memory import Gather

_TOKEN_BYTES = 16


class _Stretch(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _system_call() -> Callable[..., int] | None:
    """Return the C library's function; None: another system than Linux."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if found is not None:
        found.restype = ctypes.c_ssize_t
        pointer = ctypes.POINTER(_Stretch)
        found.argtypes = ctypes.c_int, pointer, ctypes.c_ulong, pointer, ctypes.c_ulong, ctypes.c_ulong
    return found


_readv = _system_call()


class UnreadableMemory(OSError):
    """Memory of another process cannot be read: the process has died, or the kernel forbids it."""


class PeerMemory:
    """Reads memory of one other process. One thread uses it at a time.

    Parameters
    ----------
    process : int
        Number of the process.
    """

    def __init__(self, process: int) -> None:
        self._process, self._here, self._there = process, _Stretch(), _Stretch()

    def read(self, address: int, target: AnyArray) -> None:
        """Overwrite a contiguous array with the bytes at an address.

        Raises
        ------
        UnreadableMemory
            The process has ended or has no such memory, or the kernel forbids it.
        """
        if _readv is None:
            raise UnreadableMemory(errno.ENOSYS, os.strerror(errno.ENOSYS))
        here, there, done, nbytes = self._here, self._there, 0, target.nbytes
        start = target.ctypes.data
        while done < nbytes:
            here.address, there.address = start + done, address + done
            here.nbytes = there.nbytes = nbytes - done
            count = _readv(self._process, here, 1, there, 1, 0)
            if count <= 0:
                number = ctypes.get_errno() if count else errno.EFAULT
                raise UnreadableMemory(number, os.strerror(number))
            done += count


def read_peers(gather: Gather) -> Generator[bool, None, Sequence[PeerMemory] | None]:
    """Return readers of the memory of all ranks of a node, or None where a rank cannot read that of another.

    Steps of a call, collective. All ranks try to read a random number of each other one.
    """
    token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
    texts = yield from gather(f"{os.getpid()} {token.ctypes.data} {token.tobytes().hex()}")
    found, readable = list[PeerMemory](), True
    for text in texts:
        process, address, expected = text.split()
        reader, seen = PeerMemory(int(process)), np.zeros_like(token)
        try:
            reader.read(int(address), seen)
        except UnreadableMemory:
            readable = False
        readable &= seen.tobytes().hex() == expected
        found.append(reader)
    verdicts = yield from gather("readable" if readable else "")
    # a rank frees its token after all have read it
    return found if all(verdicts) and token.size else None
