"""Files that are refused: those of another store, damaged ones, and options that make none."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicomp.pipeline import FileMessageStore
from mpicomp.pipeline.store_file import PAGE
from tests.unit.pipeline.file_stores import filled, opened, patch, row_offset, rows_of


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
