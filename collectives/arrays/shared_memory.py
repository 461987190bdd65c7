"""Memory that the ranks of a node share: a segment for each rank, which all of them read and write.

Segments are files in memory without a name, which the other ranks open by the owner's descriptor: ranks that are killed
leave nothing behind. Where they cannot, as in containers that number their processes separately, a segment has a name
until all ranks have opened it, and takes no memory before. Windows of MPI are files too. But Open MPI 5.0.11 hangs on
some ranks where one of them gets no memory for a window, and a window is freed by a collective call, which no garbage
collector can make.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from collectives.annotations import Bytes
from collectives.arrays.elements import PAGE

Gather = Callable[[str], Generator[bool, None, Sequence[str]]]
"""Steps that return the texts of all ranks of a node, in rank order; collective."""
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


def share_memory(nbytes: int, gather: Gather) -> Generator[bool, None, SharedMemory]:
    """Return memory of `nbytes` bytes for each rank of a node; steps of a call, collective.

    Raises
    ------
    MemoryError
        A rank has no memory, or cannot map that of another rank; on every rank.
    """
    size, folder = max(PAGE, nbytes), _folder()
    problem = ""
    with ExitStack() as own:
        descriptor = _open_nameless(folder, size, own)
        handles = yield from gather(_describe(descriptor))
        segments = _map_nameless(handles)
        reached = yield from gather("" if segments else "a file cannot be opened")
        if any(reached):
            descriptor, segments = yield from _share_named(folder, size, gather, own)
        try:
            # takes the memory now, on this rank's processor: a page that is missing later would end the process
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            problem = f"{_PROBLEM}{error.strerror} ({nbytes} bytes in {folder})"
        yield from _agreed(gather, problem)
    return SharedMemory([one[:nbytes] for one in segments])


def _open_nameless(folder: Path, size: int, own: ExitStack) -> int:
    """Return the descriptor of a file without a name, or -1 where the system cannot make one."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        own.callback(os.close, descriptor)
        os.ftruncate(descriptor, size)
    except (OSError, AttributeError):  # a file with a name is tried next, whose error is raised
        return -1
    return descriptor


def _describe(descriptor: int) -> str:
    """Return how other processes find a file: device, number, and path; empty for descriptor -1."""
    if descriptor < 0:
        return ""
    found = os.fstat(descriptor)
    return f"{found.st_dev} {found.st_ino} /proc/{os.getpid()}/fd/{descriptor}"


def _map_nameless(handles: Sequence[str]) -> list[Bytes]:
    """Map the files of all ranks; returns an empty list if one of them cannot be opened here."""
    segments = []
    try:
        for one in handles:
            device, number, path = one.split(" ", 2)
            found = Path(path).stat()
            if (str(found.st_dev), str(found.st_ino)) != (device, number):
                return []  # the descriptor is that of a process with the same number in this container
            segments.append(_map(Path(path)))
    except (OSError, ValueError):
        return []
    return segments


def _share_named(
    folder: Path, size: int, gather: Gather, own: ExitStack
) -> Generator[bool, None, tuple[int, list[Bytes]]]:
    """Return the descriptor of this rank's file and the segments of all ranks, which find the files by names."""
    problem, segments, descriptor = "", list[Bytes](), -1
    with ExitStack() as name:
        try:
            path = Path(name.enter_context(tempfile.TemporaryDirectory(prefix="mpicomp-", dir=folder)), "segment")
            file = own.enter_context(path.open("xb"))
            file.truncate(size)
            text, descriptor = str(path), file.fileno()
        except OSError as error:
            text = f"{_PROBLEM}{error.strerror} (a file in {folder})"
        names = yield from _agreed(gather, text)
        try:
            segments = [_map(Path(one)) for one in names]
        except OSError as error:
            problem = f"{_PROBLEM}{error}"
        yield from _agreed(gather, problem)
    return descriptor, segments


def _agreed(gather: Gather, text: str) -> Generator[bool, None, Sequence[str]]:
    """Return the texts of all ranks, unless one of them is a problem."""
    texts = yield from gather(text)
    if problem := next((one for one in texts if one.startswith(_PROBLEM)), ""):
        raise MemoryError(problem.removeprefix(_PROBLEM))
    return texts


def _map(path: Path) -> Bytes:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def _folder() -> Path:
    with suppress(StopIteration):
        return next(one for one in FOLDERS if os.access(one, os.W_OK | os.X_OK))
    return Path.cwd()
