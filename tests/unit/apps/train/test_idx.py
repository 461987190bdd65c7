"""IDX files: read whole, or refused in one sentence that names the file."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from apps.train.idx import read_idx

PIXELS = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
CONTENT = bytes((0, 0, 8, 3)) + np.array(PIXELS.shape, ">u4").tobytes() + PIXELS.tobytes()


def header(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()


def write(folder: Path, content: bytes, name: str = "images") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_reads_plain_and_gzipped(tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_idx(write(tmp_path, CONTENT), 3), PIXELS)
    np.testing.assert_array_equal(read_idx(write(tmp_path, gzip.compress(CONTENT), "images.gz"), 3), PIXELS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT[:-1], "announces 2 x 3 x 4 elements but holds 23"),
        (CONTENT + b"\0", "holds 25"),
        (CONTENT[:9], "ends after 9 bytes"),
        (b"", "ends after 0 bytes"),
        (b"PNG!" + CONTENT[4:], "starts with 504e4721"),
        (bytes((0, 0, 8, 1)) + CONTENT[4:], "starts with 00000801"),
        (bytes((0, 0, 8, 3)) + b"\xff" * 12, "announces 4294967295 x .* but holds 0"),
    ],
)
def test_refuses_damaged_files_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        read_idx(path, 3)


@pytest.mark.parametrize("damage", ["cut", "garbled", "not gzip"])
def test_refuses_damaged_gzip_by_name(tmp_path: Path, damage: str) -> None:
    packed = gzip.compress(header(10, 10, 10) + np.random.default_rng(0).bytes(1000))
    garbled = packed[:100] + bytes(byte ^ 0xFF for byte in packed[100:120]) + packed[120:]
    content = {"cut": packed[:-20], "garbled": garbled, "not gzip": CONTENT}[damage]
    path = write(tmp_path, content, "images.gz")
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(2, 3, 4) + bytes(23), "holds 23"),
        (header(2, 3, 4) + bytes(100_000_000), "holds more"),
        (header(100_000, 28, 28) + bytes(100_000_000), "announces 100000 x 28 x 28 elements in"),
        (header(2**32 - 1, 2**32 - 1, 2**32 - 1), "announces 4294967295 x .* as no images are"),
    ],
    ids=["short", "long", "bomb", "boundless"],
)
def test_a_packed_file_takes_no_more_memory_than_it_announces_and_images_need(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = write(tmp_path, gzip.compress(content, 9), "images.gz")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"{path}.*({message})"):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_plain_file_is_read_once_into_the_memory_it_needs(tmp_path: Path) -> None:
    path = write(tmp_path, header(1000, 100, 100) + bytes(10_000_000))
    tracemalloc.start()
    try:
        assert read_idx(path, 3).shape == (1000, 100, 100)
        assert tracemalloc.get_traced_memory()[1] < 13_000_000
    finally:
        tracemalloc.stop()
