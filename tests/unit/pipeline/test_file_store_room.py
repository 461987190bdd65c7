"""Room on the disk, which a store in a file takes when it is made."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from mpicomp.pipeline import FileMessageStore
from tests.unit.pipeline.file_stores import filled, opened, rows_of


def test_the_blocks_are_taken_at_the_start(path: Path) -> None:
    with FileMessageStore(path, 1000, 1000, fingerprint="run"):
        assert path.stat().st_blocks * 512 >= 4_000_000


def test_a_disk_that_is_too_small_is_refused_with_bytes_needed_and_free_and_leaves_no_file(path: Path) -> None:
    with pytest.raises(
        OSError, match=r"the store takes 70368752570368 bytes, and the disk has \d+ free .*make room"
    ) as told:
        FileMessageStore(path, 1 << 20, 1 << 24, fingerprint="run")
    assert told.value.errno == errno.ENOSPC
    assert not path.exists()


def test_a_disk_that_fills_while_blocks_are_taken_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"takes 8312 bytes, and the disk has \d+ free \(No space left"):
        opened(path)
    assert not path.exists()


def test_a_system_that_gives_files_no_room_is_refused(path: Path) -> None:
    """The limit of this process's files stands for a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"the store takes \d+ bytes.*\(File too large\)"):
            FileMessageStore(path, 1000, 1000, fingerprint="run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


def test_a_file_system_that_cannot_take_blocks_ahead_is_accepted_if_it_has_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(file: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    filled(path)
    with opened(path) as store:
        assert np.array_equal(store.read([1, 3]), rows_of(1, 3))
