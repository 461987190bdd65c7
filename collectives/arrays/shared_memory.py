"""Memory that the ranks of a node share: a segment for each rank, which all of them read and write.

Segments are files in memory, which are removed as soon as all ranks have mapped them, so that nothing is left behind
when ranks are killed. Windows of MPI are such files too. But Open MPI 5.0.11 hangs on some ranks where one of them gets
no memory for a window, and a window is freed by a collective call, which no garbage collector can make.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from collectives.annotations import Bytes
from collectives.arrays.elements import PAGE

Gather = Callable[[str], Sequence[str]]
"""Return the texts of all ranks of a node, in rank order; collective."""
FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
_PROBLEM = "\0"  # first character of the reason why a rank has no memory


class SharedMemory:
    """Segments of the ranks of a node. They are freed with the last array that refers to them.

    Parameters
    ----------
    segments : list of uint8[nbytes]
        Memory of each rank, in rank order; each begins at a page.
    """

    def __init__(self, segments: list[Bytes]) -> None:
        self.segments = segments
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Order this rank's accesses before the call and after it, as the other ranks see them."""
        # A lock's release keeps earlier accesses before it, and the next acquisition later ones behind it.
        for _ in range(2):
            with self._lock:
                pass


def share_memory(nbytes: int, gather: Gather) -> SharedMemory:
    """Return memory of `nbytes` bytes for each rank of a node; collective.

    Raises
    ------
    MemoryError
        A rank has no memory, or cannot map that of another rank; on every rank.
    """
    with tempfile.TemporaryDirectory(prefix="mpicomp-", dir=_folder()) as folder:
        own = Path(folder, "segment")
        text = str(own)
        try:
            with own.open("xb") as file:
                # takes the memory now, on this rank's processor: a page that is missing later would end the process
                os.posix_fallocate(file.fileno(), 0, max(PAGE, nbytes))
        except OSError as error:
            text = f"{_PROBLEM}{error.strerror} ({nbytes} bytes in {own.parent.parent})"
        names = gather(text)
        segments, problem = list[Bytes](), next((one for one in names if one.startswith(_PROBLEM)), "")
        if not problem:
            try:
                segments = [_map(Path(name))[:nbytes] for name in names]
            except OSError as error:
                problem = f"{_PROBLEM}{error}"
        problem = next((one for one in gather(problem) if one), "")
    if problem:
        raise MemoryError(problem.removeprefix(_PROBLEM))
    return SharedMemory(segments)


def _map(path: Path) -> Bytes:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def _folder() -> Path:
    with suppress(StopIteration):
        return next(one for one in FOLDERS if os.access(one, os.W_OK | os.X_OK))
    return Path.cwd()
