"""The thread that reads and writes the file of a store."""

from __future__ import annotations

import errno
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicomp.pipeline import FileMessageStore
from mpicomp.pipeline.store_file import StoreFile
from tests.unit.pipeline.file_stores import filled, opened, rows_of


class Gate:
    """Holds the thread before each write to the file, and notes who reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.readers: list[str] = []
        write, read = StoreFile.write_row, StoreFile.read_row

        def gated(file: StoreFile, row: int, payload: Any, stamp: int) -> int:
            assert self.opened.wait(20)
            return write(file, row, payload, stamp)

        def noted(file: StoreFile, row: int, out: Any) -> None:
            self.readers.append(threading.current_thread().name)
            read(file, row, out)

        monkeypatch.setattr(StoreFile, "write_row", gated)
        monkeypatch.setattr(StoreFile, "read_row", noted)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Give a gate, which is open after the test."""
    one = Gate(monkeypatch)
    yield one
    one.opened.set()


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition that a thread brings about."""
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
    read, entered, leave = StoreFile.read_row, threading.Event(), threading.Event()

    def slow(file: StoreFile, row: int, out: Any) -> None:
        read(file, row, out)
        if threading.current_thread().name == "mpicomp message store":
            entered.set()
            assert leave.wait(20)

    monkeypatch.setattr(StoreFile, "read_row", slow)
    with opened(path) as store:
        store.prefetch([3])
        assert entered.wait(20)
        store.write([3], rows_of(4))
        leave.set()
        store.touched_checksum()
        assert np.array_equal(store.read([3]), rows_of(4))


def test_a_reader_waits_for_the_row_that_the_thread_is_reading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    read, entered, readers = StoreFile.read_row, threading.Event(), []

    def slow(file: StoreFile, row: int, out: Any) -> None:
        readers.append(threading.current_thread().name)
        entered.set()
        time.sleep(0.05)
        read(file, row, out)

    monkeypatch.setattr(StoreFile, "read_row", slow)
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


def test_a_batch_larger_than_the_limit_is_written_by_itself(path: Path) -> None:
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
        broken.setattr(StoreFile, "write_row", fails)
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


def test_a_waiting_writer_raises_when_the_thread_has_failed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def fails(file: StoreFile, row: int, payload: Any, stamp: int) -> int:
        assert go.wait(20)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(StoreFile, "write_row", fails)
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


def test_a_store_that_is_collected_as_garbage_in_its_own_thread_is_written_and_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, go = StoreFile.write_row, threading.Event()

    def collects(file: StoreFile, row: int, payload: Any, stamp: int) -> int:
        assert go.wait(20)
        gc.collect()
        return write(file, row, payload, stamp)

    monkeypatch.setattr(StoreFile, "write_row", collects)
    before = threading.active_count()
    cycle: list[Any] = [opened(path)]
    cycle.append(cycle)
    cycle[0].write([2], rows_of(2))
    cycle[0].write([3], rows_of(3))
    del cycle
    go.set()
    until(lambda: threading.active_count() == before)
    with opened(path) as again:
        assert np.array_equal(again.read([2, 3]), rows_of(2, 3))
        assert again.torn.size == 0
