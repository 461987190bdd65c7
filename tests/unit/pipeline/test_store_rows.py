"""The checksum of a set of messages: what two sets that differ must not have in common."""

from __future__ import annotations

import numpy as np

from mpicomp.pipeline.store_rows import row_code, sum_codes

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
