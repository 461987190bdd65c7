"""Stores in files: their content, owner, room on the disk, recovery after a crash, and files that are refused."""

from __future__ import annotations

import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicomp.pipeline import FileMessageStore, differing
from mpicomp.pipeline.store_file import PAGE
from tests.unit.pipeline.file_stores import filled, opened, patch, row_offset, rows_of

PROJECT = Path(__file__).resolve().parents[3]


def test_a_store_opens_again_with_its_rows(path: Path) -> None:
    filled(path)
    with opened(path) as store:
        assert store.all_stamps().tolist() == [0, 1, 0, 1, 0]
        assert np.array_equal(store.read([3, 0, 1]), rows_of(3, 0, 1))
        assert store.torn.size == 0
        store.forget([1])
    with opened(path) as store:
        assert store.all_stamps().tolist() == [0, 1 | 1 << 31, 0, 1, 0]


def test_written_rows_are_in_the_file_when_the_program_ends_without_closing(path: Path) -> None:
    script = "\n".join(
        [
            "import sys, numpy as np",
            "from mpicomp.pipeline import FileMessageStore",
            "store = FileMessageStore(sys.argv[1], 5, 6, fingerprint='run')",
            "store.write([2], np.full((1, 6), 2, np.float32))",
        ]
    )
    subprocess.run([sys.executable, "-c", script, path], cwd=PROJECT, check=True)
    with opened(path) as store:
        assert np.array_equal(store.read([2]), rows_of(2))
        assert store.torn.size == 0


def test_a_store_that_is_no_longer_referred_to_is_closed(path: Path) -> None:
    store = opened(path)
    store.write([2], rows_of(2))
    del store
    with opened(path) as again:
        assert np.array_equal(again.read([2]), rows_of(2))


def test_a_file_is_open_once(path: Path) -> None:
    told = "another process has this store open: give every rank a file of its own"
    with opened(path), pytest.raises(BlockingIOError, match=told):
        opened(path)
    opened(path).close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_that_closes_the_store_neither_unlocks_the_file_nor_calls_it_whole(path: Path) -> None:
    with opened(path) as store:
        store.write([2], rows_of(2))
        store.touched_checksum()
        child = os.fork()
        if not child:
            store.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.read_bytes()[PAGE - 8 : PAGE] == b"writing\n"
        with pytest.raises(BlockingIOError, match="another process has this store open"):
            opened(path)
    assert path.read_bytes()[PAGE - 8 : PAGE] == b"whole..\n"


def test_a_checkpoint_tells_which_rows_have_changed_since(path: Path) -> None:
    filled(path)
    with opened(path) as store:
        state = store.state_dict()
        assert "rows" not in state
        store.write([3, 0], rows_of(5, 6))
        store.flush()
    with opened(path) as store:
        store.load_state_dict(state)
        assert differing(state["stamps"], store.all_stamps()).tolist() == [0, 3]
        assert np.array_equal(store.read([3]), rows_of(5))


def test_a_flushed_store_is_whole_in_the_file(path: Path, tmp_path: Path) -> None:
    with opened(path) as store:
        store.write([1], rows_of(1))
        store.state_dict()
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
        store.write([1], rows_of(2))
    with opened(copy) as store:
        assert np.array_equal(store.read([1]), rows_of(1))
        assert store.torn.size == 0


WRITER = """
import sys
import numpy as np
from mpicomp.pipeline import FileMessageStore

store = FileMessageStore(sys.argv[1], 50, 3000, fingerprint="run", buffer_bytes=100_000)
visit = int(store.all_stamps().max() & 0x7FFFFFFF)
print("writing", flush=True)
while True:
    visit += 1
    for first in range(0, 50, 5):
        ids = np.arange(first, first + 5)
        store.write(ids, np.repeat(100_000.0 * ids + visit, 3000).reshape(5, 3000).astype(np.float32), visit)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_rows_only(path: Path) -> None:
    """Whatever stamp a row has, it holds what was written with it."""
    for pause in (0.02, 0.05, 0.0, 0.03):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path], cwd=PROJECT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
        with FileMessageStore(path, 50, 3000, fingerprint="run") as store:
            stamps = store.stamps(range(50))
            expected = np.where(stamps == 0, 0, 100_000 * np.arange(50) + stamps).astype(np.float32)
            assert np.array_equal(store.read(range(50)), np.repeat(expected, 3000).reshape(50, 3000))
            assert set(np.flatnonzero(store.all_stamps() >> 31)) >= set(store.torn)
    assert stamps.any()


def crashed(path: Path, row: int, content: bytes) -> None:
    """Make the file what a process leaves that was killed after some bytes of a row, and before its mark."""
    patch(path, PAGE - 8, b"writing\n")
    patch(path, row_offset(row), content)


def test_a_row_that_was_being_written_at_a_crash_is_forgotten_and_found_by_the_other_end(path: Path) -> None:
    filled(path)
    with opened(path) as store:
        theirs = store.all_stamps()
    crashed(path, 3, rows_of(4).tobytes()[:9])
    with opened(path) as store:
        assert store.torn.tolist() == [3]
        assert store.stamps([1, 3]).tolist() == [1, 0]
        assert differing(store.all_stamps(), theirs).tolist() == [3]
    with opened(path) as store:  # once told, it is a row like any other
        assert store.torn.size == 0
        assert store.stamps([1, 3]).tolist() == [1, 0]


def test_a_file_whose_making_was_interrupted_is_made_again(path: Path) -> None:
    path.write_bytes(b"")
    filled(path)
    path.unlink()
    path.write_bytes(b"mpicNEW\n" + bytes(9000))
    filled(path)
    with opened(path) as store:
        assert np.array_equal(store.read([1, 3]), rows_of(1, 3))


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


def without_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_without_a_free_byte_is_refused_with_file_bytes_and_cure(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", without_room)
    with pytest.raises(
        OSError, match=r"takes 8312 bytes, and the disk has \d+ free \(No space left .*make room"
    ) as told:
        opened(path)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, str(path))
    assert not path.exists()


def test_a_disk_that_is_full_later_is_named_with_file_and_cure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as store, monkeypatch.context() as full:
        full.setattr(os, "pwrite", without_room)
        with pytest.raises(OSError, match=r"cannot be written \(No space left on device\): make room .*: '.*'"):
            store.pair = 1


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fingerprint": "other"},
            "another run or model .*fingerprint is 'run', this one's 'other'.*name another file",
        ),
        ({"examples": 6}, "a store whose examples is 5, and 6 is asked for: name another file, or remove this one"),
        ({"variants": 2}, "a store whose variants is 1, and 2 is asked for"),
    ],
)
def test_another_runs_store_is_refused_and_left_as_it_is(path: Path, options: dict[str, Any], message: str) -> None:
    filled(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        opened(path, **options)
    assert path.read_bytes() == before


def test_a_store_of_other_bits_is_refused(path: Path, halves: Any) -> None:
    filled(path)
    with pytest.raises(ValueError, match=r"whose format is 'float32', and 'Halves\(\)' is asked for"):
        opened(path, codec=halves)


def test_another_row_shape_is_refused(path: Path) -> None:
    filled(path)
    with pytest.raises(ValueError, match=r"whose row_shape is \[6\], and \[2, 3\] is asked for"):
        FileMessageStore(path, 5, (2, 3), fingerprint="run")


def change_version(path: Path) -> None:
    patch(path, 8, struct.pack("<I", 9))


def change_text(path: Path) -> None:
    """The text is no JSON, and its checksum is right."""
    patch(path, 8, struct.pack("<III", 1, 4, zlib.crc32(b"{]]]")) + b"{]]]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 2 * PAGE + 100), r"is damaged \(it has 8292 of 8312 bytes\): remove it, and"),
        (lambda path: os.truncate(path, 100), r"is damaged \(it ends after 100 bytes\)"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "it has 8313 of 8312 bytes"),
        (lambda path: patch(path, 30, b"\xff"), "its first page has another checksum than it names"),
        (lambda path: patch(path, 12, b"\xff\xff\xff\xff"), "its first page has another checksum than it names"),
        (lambda path: patch(path, PAGE - 8, b"garbage!"), "the end of its first page has been overwritten"),
        (change_text, r"is damaged \("),
        (change_version, "is a store of version 9, and this is 1: remove it"),
        (lambda path: path.write_bytes(b"a text of somebody's"), "is no store of messages: name another file"),
        (lambda path: patch(path, 0, bytes(8)), "is no store of messages: name another file"),
    ],
)
def test_a_file_that_is_damaged_or_no_store_is_refused_by_name(
    path: Path, damage: Callable[[Path], object], message: str
) -> None:
    filled(path)
    damage(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message) as raised:
        opened(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == before


def test_a_row_that_the_disk_has_changed_is_an_error_until_it_is_forgotten(path: Path) -> None:
    filled(path)
    patch(path, row_offset(3) + 5, b"\xff")
    with opened(path) as store:
        store.prefetch([3])
        for _ in range(2):
            with pytest.raises(ValueError, match=f"row 3 of {path} is damaged on the disk: forget it on both ends"):
                store.read([1, 3])
        assert np.array_equal(store.read([1]), rows_of(1))
        store.forget([3])
        assert not store.read([3]).any()


def test_rows_that_changed_places_on_the_disk_are_seen(path: Path) -> None:
    filled(path)
    content = path.read_bytes()
    patch(path, PAGE + 8 * 1, content[PAGE + 8 * 3 :][:8])
    patch(path, row_offset(1), content[row_offset(3) :][:24])
    with opened(path) as store, pytest.raises(ValueError, match=r"row 1 of .* is damaged"):
        store.read([1])


def test_a_folder_that_is_missing_is_named(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        opened(path.parent / "missing" / "store")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fingerprint": 3}, "fingerprint must be a text, not 3"),
        ({"fingerprint": "x" * 5000}, "shorten its fingerprint"),
        ({"buffer_bytes": 0}, "buffer_bytes must be an integer of 1 or more"),
    ],
)
def test_options_that_make_no_file_are_refused_and_leave_none(path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(path, **options)
    assert not path.exists()
