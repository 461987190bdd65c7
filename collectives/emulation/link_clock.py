"""Times until which an emulated link is occupied, of one rank or of all ranks of a node."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collectives.annotations import override
from collectives.consistency.descriptions import gather_texts

OUT, IN = 0, 1  # directions of a link
SHARING_S = 60.0  # for the ranks of a node to open their file


class LinkClock:
    """Times until which the link of a rank is occupied in each direction, by `time.perf_counter`."""

    def __init__(self) -> None:
        self._until: list[float] | memoryview[float] = [0.0, 0.0]

    def occupy(self, direction: int, since: float, seconds: float) -> float:
        """Occupy a direction for so many seconds, from `since` on or as soon as it is free; return the end."""
        end = self._until[direction] = max(since, self._until[direction]) + seconds
        return end


class NodeClock(LinkClock):
    """The same for the link of a node, whose ranks keep the times in a file and lock it for each message.

    The ranks are processes of one machine, or threads: both have the same clock, and locks of a file that each has
    opened itself exclude either.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        self._until = memoryview(mmap.mmap(self._file, 2 * 8)).cast("d")

    @override
    def occupy(self, direction: int, since: float, seconds: float) -> float:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            return super().occupy(direction, since, seconds)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def share_clock(comm: Any, node_of: Sequence[int]) -> LinkClock:
    """Return the clock of the link that the ranks of this rank's node share; collective.

    `node_of` has the node of each rank.

    Raises
    ------
    OSError
        A rank cannot open the node's file; on every rank.
    """
    node = node_of[comm.rank]
    first, clock, path, problems = node_of.index(node), LinkClock(), "", []
    if first == comm.rank and node_of.count(node) > 1:
        try:
            path = _make_file()
        except OSError as error:
            problems.append(error)
    common = gather_texts(comm, path, SHARING_S)[first]
    if common:
        try:
            clock = NodeClock(common)
        except OSError as error:
            problems.append(error)
    here = f"rank {comm.rank} of {comm.size}: link: no file for the link of this rank's node"
    texts = gather_texts(comm, f"{here}: {problems[0]}; make room there, or set TMPDIR" if problems else "", SHARING_S)
    if path:
        with suppress(OSError):
            Path(path).unlink()
    if any(texts):
        raise OSError(next(filter(None, texts)))
    return clock


def _make_file() -> str:
    number, path = tempfile.mkstemp(prefix="mpicomp-link-")
    with os.fdopen(number, "wb") as file:
        file.write(bytes(2 * 8))
    return path
