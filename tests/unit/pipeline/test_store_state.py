"""States of stores in checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.pipeline import MessageStore
from tests.unit.pipeline.stores import rows_of, visited


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
