"""Folders that keep compiled kernels: one per state of the sources, shared by the processes of a machine.

A folder's name has a hash of everything that compiled code depends on: the sources of all kernels, since kernels have
functions of other files compiled in, the versions of the packages that compile them, and the processor. So nothing in a
folder ever becomes stale, whether it lies in ``NUMBA_CACHE_DIR``, next to the sources or in a user's cache, and
installations that differ share such a place without harm.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba import config

from collectives.atomic_file import replacing
from collectives.caller_warning import warn_caller
from collectives.trusted_file import open_folder, open_trusted

KEPT_FOLDERS = 8  # of other states of the sources, in one place: about 15 MB each
LONGEST_WAIT_S = 120.0  # for another process that compiles the same kernel; the longest takes 3 s of an idle processor
POLL_S = 0.02
_PREFIX = "mpicomp-kernels-"
_NAME = re.compile(re.escape(_PREFIX) + "[0-9a-f]{20}")
_HERE = Path(__file__).resolve().parent
_CURE = "set NUMBA_CACHE_DIR to a folder that you may write and that has room"


def _sources() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of everything that is compiled into kernels."""
    for suffix in ("py", "pyc"):  # an installation may have no sources
        files = sorted([*_HERE.glob(f"*.{suffix}"), *(_HERE / "cpu").glob(f"*.{suffix}")])
        if files:
            yield from ((str(file.relative_to(_HERE)), file.read_bytes()) for file in files)
            return
    archive = next((place for place in _HERE.parents if place.is_file()), None)
    if archive is not None:
        yield archive.name, archive.read_bytes()


def _stamp() -> str:
    """Return the hash of everything that compiled kernels depend on."""
    chosen = config.CPU_NAME, config.CPU_FEATURES, config.OPT, config.BOUNDSCHECK, config.DEBUGINFO_DEFAULT
    versions = sys.version, numba.__version__, llvmlite.__version__, np.__version__
    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    found = hashlib.sha256(repr((versions, processor, *map(str, chosen))).encode())
    for name, content in _sources():
        found.update(f"\n{name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:20]


# Computed when kernels are imported: a checkout may be updated while a process runs.
NAME = _PREFIX + _stamp()


class CacheFolder:
    """Place of this process's compiled kernels, which is looked for when the first one is needed.

    Kernels are read from every place that has them, so that an image with warm kernels that nobody may write to is of
    use. They are written to the first place that takes them. A kernel is a pickle, which runs code when it is read: see
    `collectives.trusted_file` for the places and files that are left out.
    """

    def __init__(self) -> None:
        self._places: list[Path] | None = None
        self._to_write: Path | None = None
        self._refused: set[Path] = set()
        self._locks_work = True
        self.problem = ""
        """Reason for which kernels are not kept in the preferred place; empty as long as they are."""

    @property
    def places(self) -> list[Path]:
        """Folders in which kernels may lie, the preferred one first; they need not exist."""
        if self._places is None:
            self._places = list(_preferred())
            for place in self._places:
                with suppress(OSError):
                    os.utime(place)  # `_clear` keeps the folders that were used last
        return self._places

    @property
    def folder(self) -> Path:
        """Folder of new kernels."""
        return self._to_write or self.places[0]

    def count(self) -> int:
        """Return how many compiled kernels there are."""
        return len({file.name for place in self.places for file in place.glob("*.nbc") if self.has(file.name)})

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None where no place has it."""
        for place in self.places:
            with suppress(OSError), open_trusted(place, name) as file:
                return file.read()
        return None

    def has(self, name: str) -> bool:
        """Return whether a place has a file."""
        return self.read(name) is not None

    def write(self, name: str, content: bytes) -> None:
        """Keep a file for other processes and later runs, or warn once that this is not possible."""
        while (place := self.to_write()) is not None:
            try:
                _write(place / name, content)
            except FileNotFoundError:  # another process has cleared the folder
                self._to_write = None
                with suppress(OSError):
                    _create(place)
                    _write(place / name, content)
                    return
                self._refuse(place, OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
            except OSError as error:
                self._refuse(place, error)
            else:
                return

    def to_write(self) -> Path | None:
        """Return the folder that new kernels are written to, which then exists; None: there is no such place."""
        if self._to_write is None:
            for place in self.places:
                if place in self._refused:
                    continue
                try:
                    _create(place)
                except OSError as error:
                    self._refuse(place, error)
                else:
                    self._to_write = place
                    break
            else:
                self._to_write = self._fall_back()
        return self._to_write

    def _refuse(self, place: Path, error: OSError) -> None:
        """Use a place no longer for writing."""
        self._refused.add(place)
        self._to_write = None
        self.problem = self.problem or f"{place.parent} takes no compiled kernels ({error.strerror or error})"

    def _fall_back(self) -> Path | None:
        """Return a folder among temporary files that is this user's own; warns of it."""
        if len(self._refused) > len(self.places):
            return None  # that one was refused too
        try:
            own = Path(tempfile.gettempdir()) / f"mpicomp-{os.getuid()}"
            place = _private(own) / NAME
            if place in self._refused:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            is_new = not place.exists()
            _create(place)
        except OSError as error:
            self._refused.update((*self.places, Path()))
            problem = f"{self.problem}, nor do temporary files ({error.strerror or error})"
            warn_caller(f"{problem}: every process compiles them again; {_CURE}")
            self._locks_work = False  # processes would compile one after the other, and all of them
            return None
        if is_new:
            warn_caller(f"{self.problem}: they are kept in {place.parent}; {_CURE}")
        self.places.append(place)
        return place

    @contextmanager
    def only_one(self, name: str, is_done: Callable[[], bool]) -> Iterator[None]:
        """Let one process at a time make a file; the others wait until `is_done`, or the maker has ended.

        The lock is that of a file next to the kernels: it ends with its holder, and reaches as far as the
        folder does. Where it does not work, or the holder stands still, everyone makes the file.
        """
        place = self.to_write() if self._locks_work and not is_done() else None
        lock = None if place is None else _open_lock(place / f"{name}.lock")
        if lock is None:
            yield
            return
        try:
            if not _lock(lock, is_done):
                self._locks_work = False
                text = f"another process has compiled a kernel in {place} for {LONGEST_WAIT_S:g} s: this one no longer"
                warn_caller(f"{text} waits for it")
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may have the file open too
            os.close(lock)


def _preferred() -> Iterator[Path]:
    """Yield the places that a user would look for kernels in."""
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR).absolute() / NAME
        return
    if _HERE.is_dir():
        yield _HERE / "cpu" / "__pycache__" / NAME
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):  # there is no home
        found = home.expanduser()
        if found.is_absolute():
            yield found / "mpicomp" / NAME


def _create(place: Path) -> None:
    """Make a folder, and be sure that files can be written to it, but not by other users."""
    if not place.exists():
        # and not 0o775, which a umask of 002 allows: such a folder is not read
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        _clear(place.parent)
    os.close(open_folder(place))
    tempfile.TemporaryFile(dir=place).close()


def _private(folder: Path) -> Path:
    """Return a folder that nobody else can write to, since files that are loaded from it are executed."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="mpicomp-"))
    return folder


def _clear(parent: Path) -> None:
    """Remove the folders of other states of the sources that were not used for the longest time.

    A process that still uses one compiles again the kernels that it has not loaded yet.
    """
    with suppress(OSError):
        found = [place for place in parent.iterdir() if _NAME.fullmatch(place.name) and place.name != NAME]
        used = {}
        for place in found:
            with suppress(OSError):  # another process clears too
                used[place] = place.stat().st_mtime
        for place in sorted(used, key=used.__getitem__, reverse=True)[KEPT_FOLDERS:]:
            shutil.rmtree(place, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with replacing(path, durable=False) as file:  # a lost kernel is compiled again
        file.write(content)
        os.fchmod(file.fileno(), 0o644)  # other users read it


def _open_lock(file: Path) -> int | None:
    """Open a file to lock it; None where that cannot be done."""
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # another user's file may be open to readers alone
        with suppress(OSError):
            return os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    return None


def _lock(lock: int, is_done: Callable[[], bool]) -> bool:
    """Wait for a lock, or until there is no need for it; False where it takes too long."""
    end = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_done():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        except OSError:  # this file system has no locks
            return True
        else:
            return True


CACHE = CacheFolder()
