"""Guard of communicators that are half made when a rank dies, in Open MPI from 5.0.10 on.

Open MPI lists a new communicator once its number is agreed on, and gives it a table of collective functions (`c_coll`)
one agreement later. If a member's death is noticed in between, `ompi_comm_revoke_local` calls a function of that table,
which is still NULL: all survivors end by SIGSEGV. Releases up to 5.0.9 have no such call.

The call follows that of another function, which is in a table that can be written. So the guard takes that function's
place, and lends the communicator a table for the time of the call. The offsets differ between builds. They are searched
for in communicators that are complete; nothing is changed unless there is exactly one place for each.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from mpi4py import MPI

_WORD = ctypes.sizeof(ctypes.c_void_p)
_COMMUNICATOR_BYTES, _TABLE_BYTES, _PML_WORDS = 512, 2048, 16  # searched
_Revoke = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_bool)
_RevokeCollectives = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@cache
def guard_half_made() -> bool:
    """Let this process outlive deaths while a communicator is made; returns False where there is nothing to guard.

    Examples
    --------
    >>> from collectives.recovery.half_made import guard_half_made
    >>> has_fault = guard_half_made()
    """
    with suppress(OSError, ValueError, AttributeError):  # another MPI, or a release that lacks one of the names
        mpi = ctypes.CDLL("libmpi.so.40", os.RTLD_NOLOAD | os.RTLD_NOW)
        revoke_collectives = _address(mpi.mca_coll_base_revoke_local)
        functions = (ctypes.c_void_p * _PML_WORDS).in_dll(mpi, "mca_pml")
        place = [*functions].index(_address(mpi.mca_pml_ob1_revoke_comm))
        found = [set(_tables(comm, revoke_collectives)) for comm in (MPI.COMM_WORLD, MPI.COMM_SELF)]
        ((table_at, function_at),) = set.intersection(*found)
        _install(functions, place, table_at, function_at)
        return True
    return False


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _tables(comm: MPI.Comm, function: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets of pointers in a communicator to a table with this function, and its offset in the table."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:  # where a wrong pointer raises OSError
        start = MPI._handleof(comm)
        for table_at, table in enumerate(_words(os.pread(memory.fileno(), _COMMUNICATOR_BYTES, start))):
            with suppress(OSError, OverflowError):
                words = _words(os.pread(memory.fileno(), _TABLE_BYTES, table))
                yield from ((table_at * _WORD, at * _WORD) for at, word in enumerate(words) if word == function)


def _words(given: bytes) -> list[int]:
    return [int.from_bytes(given[at : at + _WORD], "little") for at in range(0, len(given), _WORD)]


def _install(functions: ctypes.Array[ctypes.c_void_p], place: int, table_at: int, function_at: int) -> None:
    table, original = (ctypes.c_void_p * (_TABLE_BYTES // _WORD))(), functions[place]
    assert original is not None
    revoke = _Revoke(original)

    def revoke_any(comm: int, collectives_only: bool) -> int:
        result = revoke(comm, collectives_only)
        pointer = ctypes.c_void_p.from_address(comm + table_at)
        if pointer.value is None:
            pointer.value = ctypes.addressof(table)
        return int(result)

    def take_back(comm: int) -> int:
        ctypes.c_void_p.from_address(comm + table_at).value = None  # Open MPI would free it with the communicator
        return 0

    kept = _Revoke(revoke_any), _RevokeCollectives(take_back)
    table[function_at // _WORD] = _address(kept[1])
    functions[place] = _address(kept[0])

    def restore() -> None:  # MPI_Finalize comes after the interpreter's end
        functions[place] = original
        kept  # noqa: B018 - is called until then

    atexit.register(restore)
