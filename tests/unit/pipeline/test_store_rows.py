"""Stamps and checksums, by which the two ends of a link find rows that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.codecs.rows import LevelRows, RowQuantizer
from mpicomp.pipeline import MessageStore, differing
from mpicomp.pipeline.store_rows import MOST_VISITS, row_code, sum_codes
from tests.unit.pipeline.stores import rows_of, visited

PINNED = 0x00AEA58F  # of the row number, the stamp and the bytes 0 to 8 together


def test_a_set_has_the_sum_of_its_parts_in_any_order() -> None:
    whole = sum_codes([5, 2, 9], [1, 2, 3], [7, 8, 9])
    assert whole == sum_codes([9, 5, 2], [3, 1, 2], [9, 7, 8])
    assert whole == (sum_codes([2], [2], [8]) + sum_codes([5, 9], [1, 3], [7, 9])) % 2**64
    assert sum_codes([], [], []) == 0


def test_place_and_code_are_not_taken_for_each_other() -> None:
    assert sum_codes([0], [1], [1]) != sum_codes([1], [1], [0])


def test_the_same_change_to_two_messages_does_not_cancel() -> None:
    rows = np.arange(2)
    for bit in range(32):
        changed = np.array([0, 1 << bit], np.uint32)
        found = {sum_codes(rows + 2 * k, [1, 1], changed ^ flip) for k in range(8) for flip in (0, 1 << bit)}
        assert len(found) == 16


def test_the_code_is_pinned_since_files_hold_it() -> None:
    payload = np.arange(9, dtype=np.uint8)
    assert row_code(3, 2, payload) == PINNED
    assert len({row_code(row, stamp, payload) for row in range(4) for stamp in range(4)}) == 16
    payload[8] ^= 1
    assert row_code(3, 2, payload) != PINNED


# Stamps, and recovery of the ends after a crash ----------------------------------------------------------------------


def test_a_stamp_can_be_set(make: Any) -> None:
    store = make(5, (2, 3))
    store.write([0, 1], rows_of(1.0, 2.0), [7, 9])
    store.write([0], rows_of(1.0))
    store.write([2, 3], rows_of(1.0, 2.0), 4)
    assert store.all_stamps().tolist() == [8, 9, 4, 4, 0]
    for wrong, message in ((0, "a stamp of 0 stands for"), ([1, 2], "1 rows are given 2 stamps"), (2**31, "not in 0")):
        with pytest.raises(ValueError, match=message):
            store.write([0], rows_of(1.0), wrong)
    assert store.stamps([0]).tolist() == [8]


def test_visits_beyond_the_range_of_a_stamp_are_an_error_and_not_zero(make: Any) -> None:
    store = make(5, (2, 3))
    store.write([3], rows_of(1.0), MOST_VISITS)
    with pytest.raises(OverflowError, match="row 3 was visited"):
        store.write([3], rows_of(2.0))
    assert np.array_equal(store.read([3]), rows_of(1.0))


def test_a_forgotten_row_has_no_message_but_its_count_goes_on(make: Any) -> None:
    store = visited(make(5, (2, 3)))
    store.prefetch([3])
    store.forget([3])
    assert store.stamps([1, 3]).tolist() == [1, 0]
    assert np.array_equal(store.read([1, 3]), rows_of(1.0, 0.0))
    store.write([3], rows_of(4.0))
    assert store.stamps([3]).tolist() == [3]


def test_ends_that_differ_agree_once_both_have_forgotten_the_differing_rows(make: Any) -> None:
    """One end is a visit ahead in row 1 and behind in row 3, and has a row that the other has not."""
    mine, theirs = visited(make(5, (2, 3))), visited(MessageStore(5, (2, 3)))
    mine.write([0, 1], rows_of(1.0, 2.0))
    theirs.write([3], rows_of(4.0))
    one, other = mine.all_stamps(), theirs.all_stamps()
    ids = differing(one, other)
    assert ids.tolist() == [0, 1, 3]
    mine.forget(ids, other[ids])
    theirs.forget(ids, one[ids])
    assert differing(mine.all_stamps(), theirs.all_stamps()).size == 0
    assert mine.stamps(ids).tolist() == theirs.stamps(ids).tolist() == [0, 0, 0]
    for end in (mine, theirs):
        end.reset_checksum()
        end.write(ids, rows_of(7.0, 8.0, 9.0))
    assert mine.touched_checksum() == theirs.touched_checksum()
    assert mine.stamps(ids).tolist() == [2, 3, 4]


def test_stamps_of_other_stores_are_refused(make: Any) -> None:
    stamps = make(5, (2, 3)).all_stamps()
    with pytest.raises(ValueError, match="one end has stamps of 5 rows and the other of 4"):
        differing(stamps, stamps[:4])
    with pytest.raises(ValueError, match="stamps are uint32 in one dimension, not int64"):
        differing(stamps, stamps.astype(np.int64))


# Checksum -------------------------------------------------------------------------------------------------------------


def test_the_checksum_does_not_depend_on_the_order_of_writes_nor_on_the_kind_of_store(make: Any) -> None:
    one, other = make(5, (2, 3)), MessageStore(5, (2, 3))
    one.write([1, 3], rows_of(1.0, 3.0))
    one.write([2], rows_of(2.0))
    other.write([2, 3], rows_of(2.0, 3.0))
    other.write([1], rows_of(1.0))
    assert one.touched_checksum() == other.touched_checksum() != 0


@pytest.mark.parametrize(
    ("ids", "values", "stamps"),
    [([1, 3], (1.0, 3.0 + 2**-22), None), ([1, 2], (1.0, 3.0), None), ([3, 1], (1.0, 3.0), None), ([1, 3], (1, 3), 2)],
)
def test_the_checksum_sees_another_bit_another_id_rows_swapped_and_another_stamp(
    make: Any, ids: list[int], values: tuple[float, ...], stamps: int | None
) -> None:
    one, other = make(5, (2, 3)), make(5, (2, 3))
    one.write([1, 3], rows_of(1.0, 3.0))
    other.write(ids, rows_of(*values), stamps)
    assert one.touched_checksum() != other.touched_checksum()


def test_the_checksum_sees_signs_that_change_in_pairs(make: Any) -> None:
    """A sum of words would not see these differences."""
    one, other = make(5, 4), make(5, 4)
    one.write([0], np.array([[1, 2, 3, 4]], np.float32))
    other.write([0], np.array([[-1, 2, -3, 4]], np.float32))
    assert one.touched_checksum() != other.touched_checksum()


def test_the_checksum_covers_only_writes_since_the_last_exchange(make: Any) -> None:
    one, other = make(5, (2, 3)), make(5, (2, 3))
    one.write([0], rows_of(1.0))
    other.write([0], rows_of(2.0))
    for store in (one, other):
        store.reset_checksum()
        assert store.touched_checksum() == 0
        store.write([0], rows_of(3.0))
    assert one.touched_checksum() == other.touched_checksum() < 2**64


# Fewer bits -----------------------------------------------------------------------------------------------------------


def test_rows_of_fewer_bits_are_alike_on_both_ends(make: Any, halves: Any) -> None:
    one, other = make(5, (2, 3), codec=halves), MessageStore(5, (2, 3), codec=halves)
    rows = np.random.default_rng(1).normal(size=(2, 2, 3)).astype(np.float32)
    for end in (one, other):
        end.write([4, 0], rows)
    assert one.row_bytes == 12
    assert np.array_equal(one.read([0, 4]), other.read([0, 4]))
    assert np.array_equal(one.read([4, 0]), (rows.view(np.uint32) >> 16 << 16).view(np.float32))
    assert one.touched_checksum() == other.touched_checksum()


def test_rows_that_a_codec_has_no_code_for_change_nothing(make: Any, halves: Any) -> None:
    store = make(5, (2, 3), codec=halves)
    store.write([0], rows_of(1.0))
    with pytest.raises(ValueError, match="NaN or infinity"):
        store.write([1, 0], rows_of(2.0, np.nan))
    assert store.stamps([0, 1]).tolist() == [1, 0]
    assert np.array_equal(store.read([0]), rows_of(1.0))


@pytest.mark.parametrize(("codec", "row_bytes"), [(RowQuantizer(bits=4), 2 + 8), (LevelRows(16), 2 + 32)], ids=str)
def test_rows_of_four_bits_are_alike_on_both_ends(make: Any, codec: Any, row_bytes: int) -> None:
    one, other = (made(5, (3, 16), codec=codec) for made in (make, MessageStore))
    rows = np.random.default_rng(2).normal(size=(2, 3, 16)).astype(np.float32)
    for end in (one, other):
        end.write([4, 0], rows)
    assert one.row_bytes == 3 * row_bytes
    assert np.array_equal(one.read([0, 4]), other.read([0, 4]))
    assert np.linalg.norm(one.read([4, 0]) - rows) <= 0.12 * np.linalg.norm(rows)
    assert one.touched_checksum() == other.touched_checksum()


def test_a_quantizer_that_rounds_at_random_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="rounds at random"):
        make(5, (3, 16), codec=RowQuantizer(bits=4, rounding="stochastic"))


def test_a_codec_that_rounds_at_random_is_refused(make: Any, halves: Any) -> None:
    halves.rounding = "stochastic"
    with pytest.raises(ValueError, match=r"Halves\(\) rounds at random: a store takes codecs with rounding='nearest'"):
        make(5, (2, 3), codec=halves)
