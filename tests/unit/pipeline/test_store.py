"""Promises of every store of messages, in memory and in a file, and states of stores in checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicomp import pipeline
from mpicomp.pipeline import MessageStore
from tests.unit.pipeline.stores import rows_of, visited

PROJECT = Path(__file__).resolve().parents[3]


# Rows -----------------------------------------------------------------------------------------------------------------


def test_examples_never_visited_have_stamp_0_and_rows_of_zeros(make: Any) -> None:
    store = make(5, (2, 3))
    assert store.stamps([4, 0]).tolist() == [0, 0]
    assert not store.read([4, 0]).any()
    assert (store.rows, store.row_shape, store.row_bytes) == (5, (2, 3), 24)


def test_rows_are_read_as_they_were_last_written_in_the_order_asked_for(make: Any) -> None:
    store = visited(make(5, (2, 3)))
    assert np.array_equal(store.read([3, 0, 1]), rows_of(3.5, 0.0, 1.0))
    assert store.stamps([3, 0, 1]).tolist() == [2, 0, 1]


def test_many_visits_in_any_order_keep_the_last_row_of_each_example(make: Any) -> None:
    store, expected, visits = make(20, 7), np.zeros((20, 7), np.float32), np.zeros(20, np.uint32)
    random = np.random.default_rng(0)
    for _ in range(60):
        ids = random.permutation(20)[: random.integers(0, 6)]
        store.prefetch(random.permutation(20)[:5])
        assert np.array_equal(store.read(ids), expected[ids])
        rows = random.normal(size=(ids.size, 7)).astype(np.float32)
        store.write(ids, rows)
        expected[ids] = rows
        visits[ids] += 1
    assert np.array_equal(store.read(range(20)), expected)
    assert np.array_equal(store.all_stamps(), visits)


def test_rows_written_and_rows_read_share_no_memory_with_the_store(make: Any) -> None:
    store, rows = make(3, (2, 3)), rows_of(1.0)
    store.write([0], rows)
    rows[:] = 9
    store.read([0])[:] = 9
    store.all_stamps()[:] = 9
    assert np.array_equal(store.read([0]), rows_of(1.0))
    assert store.stamps([0]).tolist() == [1]


def test_rows_can_be_read_into_an_array(make: Any) -> None:
    store, out = visited(make(5, (2, 3))), np.full((2, 2, 3), 7, np.float32)
    assert store.read([0, 1], out) is out
    assert np.array_equal(out, rows_of(0.0, 1.0))
    for wrong in (np.zeros((2, 3, 2), np.float32), np.zeros((2, 2, 3)), np.zeros((4, 2, 3), np.float32)[::2]):
        with pytest.raises(ValueError, match=r"pass contiguous float32 of shape \(2, 2, 3\)"):
            store.read([0, 1], wrong)


def test_an_empty_micro_batch_is_none(make: Any) -> None:
    store = make(5, (2, 3))
    store.write([], np.zeros((0, 2, 3), np.float32))
    store.prefetch([])
    assert store.read([]).shape == (0, 2, 3)
    assert store.touched_checksum() == 0


@pytest.mark.parametrize("shape", [(), 4, (4,), [2, 2], (2, 1, 3)])
def test_messages_of_any_shape_are_kept(make: Any, shape: Any) -> None:
    store = make(3, shape)
    whole = tuple(np.atleast_1d(shape)) if shape != () else ()
    rows = np.arange(2 * max(1, int(np.prod(whole))), dtype=np.float32).reshape(2, *whole)
    store.write([2, 0], rows)
    assert np.array_equal(store.read([2, 0]), rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((1, 3, 2), np.float32), r"rows of shape \(1, 3, 2\) .* float32 of shape \(1, 2, 3\)"),
        (np.zeros((2, 2, 3), np.float32), "no messages of 1 examples"),
        (np.zeros((1, 2, 3)), "type float64 are no messages"),
    ],
)
def test_rows_that_are_no_messages_are_refused_and_nothing_is_kept(make: Any, rows: Any, message: str) -> None:
    store = make(3, (2, 3))
    with pytest.raises(ValueError, match=message):
        store.write([0], rows)
    assert store.stamps([0]).tolist() == [0]
    assert store.touched_checksum() == 0


# Ids ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 5, 2, -1], r"ids 5, -1 are not in 0 to 4 \(5 examples of 1 variants\)"),
        (range(5, 25), r"ids 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 10 more are not in"),
        ([1.0], r"ids must be integers, not float64 \(1.0\)"),
        ([True], "ids must be integers, not bool"),
        (["1"], "ids must be integers, not <U1"),
        ([[1]], r"ids must be integers in one dimension, not of shape \(1, 1\)"),
        (1, r"ids must be integers in one dimension, not of shape \(\)"),
        ([2**64], r"ids must be integers, not object|are not in 0 to 4"),
        ([2**63], "ids 9223372036854775808 are not in 0 to 4"),
        ([3, 1, 3, 2, 2], r"ids 2, 3 occur more than once in one micro-batch.*variants="),
    ],
)
def test_ids_that_are_none_of_the_stores_are_named_and_refused(make: Any, ids: Any, message: str) -> None:
    store = make(5, (2, 3))
    count = np.size(ids)
    for call in (
        store.read,
        store.stamps,
        store.prefetch,
        store.forget,
        lambda ids: store.write(ids, np.zeros((count, 2, 3), np.float32)),
    ):
        with pytest.raises(ValueError, match=message):
            call(ids)


def test_every_variant_of_an_example_has_a_row_of_its_own(make: Any) -> None:
    store = make(3, (2, 3), variants=2)
    assert store.row_ids([2, 0, 2], [1, 0, 0]).tolist() == [5, 0, 4]
    assert store.row_ids([2, 0], 1).tolist() == [5, 1]
    store.write(store.row_ids([2, 2], [1, 0]), rows_of(1.0, 2.0))
    assert np.array_equal(store.read(store.row_ids([2], 0)), rows_of(2.0))
    for ids, which, message in (
        ([3], 0, "examples 3 are not in 0 to 2"),
        ([0], 2, "variants 2 are not in 0 to 1"),
        ([0, 1], [0], "2 examples have 1 variants"),
    ):
        with pytest.raises(ValueError, match=message):
            store.row_ids(ids, which)
    with pytest.raises(ValueError, match=r"ids 6 are not in 0 to 5 \(3 examples of 2 variants\)"):
        store.read([6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, "examples must be an integer of 1 to 2"),
        ({"examples": 2.0}, "examples must be"),
        ({"variants": 0}, "variants must be"),
        ({"row_shape": (2, 0)}, "row_shape must be integers of 1 or more"),
        ({"row_shape": "ab"}, "row_shape must be"),
    ],
)
def test_a_store_of_no_size_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"examples": 3, "row_shape": (2, 3), **options})


# Use ------------------------------------------------------------------------------------------------------------------


def test_schedules_and_stores_load_no_torch() -> None:
    script = (
        "import sys\n"
        "from mpicomp.pipeline import FileMessageStore, MessageStore, Store, differing, gpipe\n"
        "import mpicomp.pipeline.simulate\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True)


def test_every_public_name_is_there() -> None:
    stages = {"Deltas", "Direct", "PipelineError", "PipelineStage"}
    assert stages < set(pipeline.__all__)
    for name in set(pipeline.__all__) - stages:
        assert getattr(pipeline, name) is not None
    wrong = "nothing"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(pipeline, wrong)


def test_a_closed_store_says_so(make: Any) -> None:
    with make(5, (2, 3)) as store:
        store.flush()
    store.close()
    for call in (lambda: store.read([0]), store.all_stamps, store.touched_checksum, store.state_dict, store.flush):
        with pytest.raises(RuntimeError, match="the store is closed: open it again"):
            call()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_refused_and_leaves_the_store_alone(make: Any) -> None:
    store = visited(make(5, (2, 3)))
    child = os.fork()
    if not child:
        refused = False
        try:
            store.read([0])
        except RuntimeError as error:
            refused = f"belongs to process {os.getppid()}" in str(error)
        store.close()
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(store.read([1, 3]), rows_of(1.0, 3.5))
    store.write([0], rows_of(5.0))
    store.flush()


def test_a_store_in_memory_that_is_too_large_is_refused_at_the_start() -> None:
    with pytest.raises(
        MemoryError, match=r"5 rows of 24 bytes take 120 bytes: keep them in a file.*more than 119 bytes"
    ):
        MessageStore(5, (2, 3), most_bytes=119)
    with pytest.raises(MemoryError, match=r"keep them in a file \(FileMessageStore\)"):
        MessageStore(1 << 30, 1 << 20)
    with pytest.raises(ValueError, match="most_bytes must be"):
        MessageStore(5, (2, 3), most_bytes=0)


def test_a_store_in_memory_takes_memory_as_rows_are_visited() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    store = MessageStore(1 << 12, 1 << 16)  # 1 GiB
    store.write([7], np.ones((1, 1 << 16), np.float32))
    assert resident() - before < 1 << 26


def test_a_state_can_be_loaded_into_the_store_it_was_taken_from(make: Any) -> None:
    store = visited(make(5, (2, 3)))
    store.forget([1])
    state = store.state_dict()
    before = store.all_stamps()
    store.load_state_dict(state)
    assert np.array_equal(store.all_stamps(), before)
    assert np.array_equal(store.read([1, 3]), rows_of(0.0, 3.5))
    assert store.touched_checksum() == 0


def test_a_state_in_memory_has_touched_rows_only_and_restores_all() -> None:
    store, new = visited(MessageStore(5, (2, 3))), MessageStore(5, (2, 3))
    store.forget([1])
    state = store.state_dict()
    assert state["ids"].tolist() == [3]
    assert state["rows"].shape == (1, 24)
    store.write([3], rows_of(9.0))  # after the state was taken
    new.write([0], rows_of(5.0))
    new.load_state_dict(state)
    assert np.array_equal(new.read([0, 1, 3]), rows_of(0.0, 0.0, 3.5))
    assert new.all_stamps().tolist() == [0, 1 | 1 << 31, 0, 2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 6}, "a store whose examples is 6, and this one's is 5"),
        ({"row_shape": [3, 2]}, "whose row_shape is"),
        ({"format": "Halves()"}, "whose format is 'Halves"),
        ({"store": "other"}, "whose store is 'other'"),
        ({"stamps": np.zeros(4, np.uint32)}, r"stamps are uint32 of shape \(4,\)"),
        ({"stamps": np.zeros(5)}, "stamps are float64"),
        ({"more": 1}, "a state with .*more.* is not one of this store"),
    ],
)
def test_a_state_of_another_store_is_refused_and_nothing_changes(make: Any, change: Any, message: str) -> None:
    store = visited(make(5, (2, 3)))
    with pytest.raises(ValueError, match=message):
        store.load_state_dict({**store.state_dict(), **change})
    with pytest.raises(ValueError, match=r"a state with .* is not one of this store"):
        store.load_state_dict({})
    wrong: Any = [1]
    with pytest.raises(ValueError, match="is not one of this store"):
        store.load_state_dict(wrong)
    assert np.array_equal(store.read([1, 3]), rows_of(1.0, 3.5))


@pytest.mark.parametrize(
    "change", [{"ids": np.array([0, 3])}, {"ids": np.array([1])}, {"rows": np.zeros((2, 23), np.uint8)}]
)
def test_a_damaged_state_in_memory_is_refused(change: dict[str, Any]) -> None:
    store = visited(MessageStore(5, (2, 3)))
    with pytest.raises(ValueError, match="it is damaged, load an earlier one"):
        store.load_state_dict({**store.state_dict(), **change})
