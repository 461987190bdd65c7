"""Stores in files: whose they are, what is refused, crashes, and the thread behind them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicomp.pipeline import FileMessageStore, differing
from mpicomp.pipeline.store_file import StoreFile
from mpicomp.pipeline.store_header import PAGE

PROJECT = Path(__file__).resolve().parents[3]
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the test's store is; messages must survive the name."""
    return tmp_path / "store 100%d"


def opened(path: Path, fingerprint: str = "run", examples: int = 5, **options: Any) -> FileMessageStore:
    return FileMessageStore(path, examples, 6, fingerprint=fingerprint, **options)


def filled(path: Path) -> None:
    """Make a store with rows 1 and 3, which hold 1 and 3."""
    with opened(path) as store:
        store.write([1, 3], rows_of(1, 3))


def rows_of(*values: float) -> Any:
    return np.repeat(np.array(values, np.float32), 6).reshape(-1, 6)


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def row_offset(row: int) -> int:
    return 2 * PAGE + row * 24


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_store_opens_again_with_what_was_written(path: Path) -> None:
    filled(path)
    with opened(path) as store:
        assert store.all_stamps().tolist() == [0, 1, 0, 1, 0]
        assert np.array_equal(store.read([3, 0, 1]), rows_of(3, 0, 1))
        assert store.torn.size == 0
        store.forget([1])
    with opened(path) as store:
        assert store.all_stamps().tolist() == [0, 1 | 1 << 31, 0, 1, 0]


def test_what_was_written_is_in_the_file_when_the_program_ends_without_closing(path: Path) -> None:
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


# Room on the disk -----------------------------------------------------------------------------------------------------


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


# Crashes --------------------------------------------------------------------------------------------------------------


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


def test_a_file_whose_making_was_interrupted_is_made_anew(path: Path) -> None:
    path.write_bytes(b"")
    filled(path)
    path.unlink()
    path.write_bytes(b"mpicNEW\n" + bytes(9000))
    filled(path)
    with opened(path) as store:
        assert np.array_equal(store.read([1, 3]), rows_of(1, 3))


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


# The thread -----------------------------------------------------------------------------------------------------------


class Gate:
    """Holds the thread before each write to the file, and notes who reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.readers: list[str] = []
        write, read = StoreFile.write, StoreFile.read

        def gated(file: StoreFile, row: int, payload: Any, stamp: int) -> int:
            assert self.opened.wait(20)
            return write(file, row, payload, stamp)

        def noted(file: StoreFile, row: int, out: Any) -> None:
            self.readers.append(threading.current_thread().name)
            read(file, row, out)

        monkeypatch.setattr(StoreFile, "write", gated)
        monkeypatch.setattr(StoreFile, "read", noted)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Give a gate, which is open after the test."""
    one = Gate(monkeypatch)
    yield one
    one.opened.set()


def until(holds: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_rows_that_wait_to_be_written_are_read_as_written_last(path: Path, gate: Gate) -> None:
    with opened(path) as store:
        store.write([1, 3], rows_of(1, 3))
        store.write([3], rows_of(4))
        store.prefetch([3, 1])
        assert np.array_equal(store.read([1, 3]), rows_of(1, 4))
        assert gate.readers == []
        gate.opened.set()
        store.flush()
        assert np.array_equal(store.read([1, 3]), rows_of(1, 4))


def test_rows_that_were_prefetched_are_read_by_the_thread(path: Path, gate: Gate) -> None:
    gate.opened.set()
    filled(path)
    with opened(path) as store:
        store.prefetch([0, 3, 1])
        until(lambda: len(gate.readers) == 2)
        assert np.array_equal(store.read([3, 1, 0]), rows_of(3, 1, 0))
        assert gate.readers == ["mpicomp message store"] * 2
        store.read([3])
        assert gate.readers[2:] == [threading.current_thread().name]


def test_a_row_that_is_written_after_it_was_prefetched_is_read_as_written(path: Path, gate: Gate) -> None:
    gate.opened.set()
    filled(path)
    gate.opened.clear()
    with opened(path) as store:
        store.prefetch([3])
        until(lambda: len(gate.readers) == 1)
        store.write([3], rows_of(4))
        gate.opened.set()
        store.touched_checksum()
        assert np.array_equal(store.read([3]), rows_of(4))


def test_a_row_that_is_written_while_the_thread_reads_it_is_read_as_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path)
    read, entered, leave = StoreFile.read, threading.Event(), threading.Event()

    def slow(file: StoreFile, row: int, out: Any) -> None:
        read(file, row, out)
        if threading.current_thread().name == "mpicomp message store":
            entered.set()
            assert leave.wait(20)

    monkeypatch.setattr(StoreFile, "read", slow)
    with opened(path) as store:
        store.prefetch([3])
        assert entered.wait(20)
        store.write([3], rows_of(4))
        leave.set()
        store.touched_checksum()
        assert np.array_equal(store.read([3]), rows_of(4))


def test_a_reader_waits_for_the_row_that_the_thread_is_reading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    read, entered, readers = StoreFile.read, threading.Event(), []

    def slow(file: StoreFile, row: int, out: Any) -> None:
        readers.append(threading.current_thread().name)
        entered.set()
        time.sleep(0.05)
        read(file, row, out)

    monkeypatch.setattr(StoreFile, "read", slow)
    with opened(path) as store:
        store.prefetch([3])
        assert entered.wait(20)
        assert np.array_equal(store.read([3]), rows_of(3))
    assert readers == ["mpicomp message store"]


def test_rows_that_wait_take_no_more_memory_than_was_allowed(path: Path, gate: Gate) -> None:
    """Two rows fit; a third batch waits until the first is in the file."""
    written = []

    def write(store: FileMessageStore) -> None:
        for row in range(4):
            store.write([row], rows_of(row))
            written.append(row)

    with opened(path, buffer_bytes=48) as store:
        writer = threading.Thread(target=write, args=(store,))
        writer.start()
        until(lambda: len(written) == 2)
        time.sleep(0.05)
        assert written == [0, 1]
        gate.opened.set()
        writer.join(20)
        assert written == [0, 1, 2, 3]
        assert np.array_equal(store.read(range(4)), rows_of(0, 1, 2, 3))


def test_a_batch_that_is_larger_than_what_was_allowed_is_written_by_itself(path: Path) -> None:
    with opened(path, buffer_bytes=1) as store:
        for value in (1, 2):
            store.write([0, 1, 2], rows_of(value, value, value))
        store.prefetch([0, 1, 2])
        assert np.array_equal(store.read([0, 1, 2]), rows_of(2, 2, 2))


def test_rows_read_ahead_and_never_used_make_way_for_later_ones(path: Path, gate: Gate) -> None:
    gate.opened.set()
    with opened(path) as store:
        store.write(range(5), rows_of(0, 1, 2, 3, 4))
    with opened(path, buffer_bytes=48) as store:
        for some in ([0, 1], [2, 3]):
            before = len(gate.readers)
            store.prefetch(some)
            until(lambda before=before: len(gate.readers) == before + 2)
        del gate.readers[:]
        assert np.array_equal(store.read([2, 3, 0]), rows_of(2, 3, 0))
        assert gate.readers == [threading.current_thread().name]


def test_an_error_of_the_thread_surfaces_at_the_next_calls_and_the_file_is_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path)
    store = opened(path)

    def fails(file: StoreFile, row: int, payload: Any, stamp: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(StoreFile, "write", fails)
        store.write([2], rows_of(2))
        with pytest.raises(OSError, match=r"rows could not be written back.*Input/output error.*resume from the last"):
            store.touched_checksum()
    for call in (
        lambda: store.read([1]),
        lambda: store.write([1], rows_of(1)),
        lambda: store.prefetch([1]),
        store.flush,
        store.state_dict,
        store.close,
    ):
        with pytest.raises(OSError, match=f"{path}: rows could not be written back") as raised:
            call()
        assert raised.value.errno == errno.EIO
    with opened(path) as again:
        assert np.array_equal(again.read([1, 3, 2]), rows_of(1, 3, 0))


def test_a_writer_that_waits_is_told_that_the_thread_has_failed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def fails(file: StoreFile, row: int, payload: Any, stamp: int) -> int:
        assert go.wait(20)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(StoreFile, "write", fails)
    store = opened(path, buffer_bytes=1)
    store.write([0], rows_of(0))
    threading.Timer(0.02, go.set).start()
    with pytest.raises(OSError, match="rows could not be written back"):
        store.write([1], rows_of(1))
    with pytest.raises(OSError, match="rows could not be written back"):
        store.close()


def test_no_thread_is_started_before_there_is_work_and_none_is_left(path: Path) -> None:
    before = threading.active_count()
    with opened(path) as store:
        store.read([0])
        assert threading.active_count() == before
        store.write([0], rows_of(1))
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
