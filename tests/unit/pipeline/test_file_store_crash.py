"""What a store in a file holds after a crash."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mpicomp.pipeline import FileMessageStore, differing
from mpicomp.pipeline.store_file import PAGE
from tests.unit.pipeline.file_stores import filled, opened, patch, row_offset, rows_of

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
