"""Stores in files: what a file holds, and whose it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpicomp.pipeline import differing
from mpicomp.pipeline.store_file import PAGE
from tests.unit.pipeline.file_stores import filled, opened, rows_of

PROJECT = Path(__file__).resolve().parents[3]


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
