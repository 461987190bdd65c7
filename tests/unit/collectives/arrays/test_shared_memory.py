"""Memory that ranks share: threads that exchange texts stand for the ranks of a node."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.arrays import shared_memory
from collectives.arrays.shared_memory import SharedMemory, share_memory

RANKS = 3


def on_ranks(work: Callable[[int, Any], Any]) -> list[Any]:
    """Return the results of ``work(rank, gather)`` of all ranks."""
    barrier, texts = threading.Barrier(RANKS, timeout=20), [""] * RANKS

    def gather_of(rank: int) -> Any:
        def gather(text: str) -> Generator[bool, None, Sequence[str]]:
            yield True
            texts[rank] = text
            barrier.wait()
            found = list(texts)
            barrier.wait()
            return found

        return gather

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: work(rank, gather_of(rank)), range(RANKS)))


def made(nbytes: int, gather: Any) -> SharedMemory:
    steps = share_memory(nbytes, gather)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            memory: SharedMemory = end.value
            return memory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "FOLDERS", (tmp_path,))
    return tmp_path


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that cannot open each other's descriptors, as in containers of their own."""
    monkeypatch.setattr(shared_memory, "_describe", lambda descriptor: f"0 0 /proc/self/fd/{descriptor}")


def test_a_file_never_has_a_name(folder: Path) -> None:
    if shared_memory._open_nameless(folder, 1, ExitStack()) < 0:
        pytest.skip("this file system has no files without names")
    listed = list[Path]()

    def work(rank: int, gather: Any) -> None:
        def list_and_gather(text: str) -> Generator[bool, None, Sequence[str]]:
            listed.extend(folder.iterdir())
            return (yield from gather(text))

        made(100, list_and_gather)

    on_ranks(work)
    assert listed == []


@pytest.mark.usefixtures("named")
def test_ranks_that_cannot_open_descriptors_share_files_by_name(folder: Path) -> None:
    everyones = on_ranks(lambda rank, gather: made(100, gather))
    for rank, memory in enumerate(everyones):
        memory.segments[rank][:] = rank + 1
    assert [[int(one[0]) for one in memory.segments] for memory in everyones] == [[1, 2, 3]] * RANKS
    assert not any(folder.iterdir())


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_all_ranks_see_what_each_of_them_writes(folder: Path, nbytes: int) -> None:
    everyones = on_ranks(lambda rank, gather: made(nbytes, gather))
    for rank, memory in enumerate(everyones):
        memory.segments[rank][:] = rank + 1
        memory.fence()
    for memory in everyones:
        assert [one.size for one in memory.segments] == [nbytes] * RANKS
        for rank, segment in enumerate(memory.segments):
            assert (segment == rank + 1).all()
    assert not any(folder.iterdir())


@pytest.mark.usefixtures("named")
def test_files_take_memory_only_once_they_have_no_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, taking = list[bool](), os.posix_fallocate

    def take(file: int, start: int, nbytes: int) -> None:
        taken.append(os.fstat(file).st_nlink == 0)
        taking(file, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", take)
    on_ranks(lambda rank, gather: made(10_000, gather))
    assert taken == [True] * RANKS


@pytest.mark.usefixtures("named")
def test_others_cannot_look_into_a_segment(folder: Path) -> None:
    modes = list[int]()

    def work(rank: int, gather: Any) -> None:
        def looking(text: str) -> Generator[bool, None, Sequence[str]]:
            if Path(text).is_absolute():  # this rank's own file: the others' may go away at any time
                modes.append(Path(text).parent.stat().st_mode & 0o077)
            return (yield from gather(text))

        made(100, looking)

    on_ranks(work)
    assert modes == [0] * RANKS


def refuse(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("place", ["folder", "map", "pages"])
def test_a_rank_without_memory_is_an_error_on_all(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    owner, name = {
        "folder": (shared_memory.tempfile, "TemporaryDirectory"),
        "map": (shared_memory, "_map"),
        "pages": (os, "posix_fallocate"),
    }[place]
    right, bad = getattr(owner, name), list[int]()

    def on_one_rank(*arguments: Any, **options: Any) -> Any:
        return (refuse if threading.get_ident() in bad else right)(*arguments, **options)

    monkeypatch.setattr(owner, name, on_one_rank)

    def work(rank: int, gather: Any) -> str:
        if rank == 1:
            bad.append(threading.get_ident())
        with pytest.raises(MemoryError) as caught:
            made(100, gather)
        return str(caught.value)

    found = on_ranks(work)
    assert len(set(found)) == 1
    assert "No space left on device" in found[0]
    assert not any(folder.iterdir())


def test_memory_is_freed_with_its_arrays(folder: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(folder))

    everyones = on_ranks(lambda rank, gather: made(10_000, gather))
    part: np.ndarray[Any, Any] | None = everyones[0].segments[0][5:]
    assert mapped() == RANKS * RANKS
    del everyones
    assert mapped() == 1
    del part
    assert not mapped()
