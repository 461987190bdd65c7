"""Reader of IDX files, the format of MNIST and its successors, plain or gzipped.

The layout is: two zero bytes, one byte naming the element type (8 is uint8), one byte with the number of dimensions,
each dimension as a big-endian uint32, then the elements, the last dimension fastest.
"""

from __future__ import annotations

import gzip
import math
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np

from collectives.regular_file import open_regular

Reader = gzip.GzipFile | BufferedReader
_UINT8 = 8
_BLOCK_NBYTES = 1 << 20
# Images are seldom packed to less than a tenth. Small files may be, so that no memory is at stake.
_MOST_GZIP_RATIO, _SMALL_NBYTES = 100, 1 << 26


def read_idx(path: Path, n_dims: int) -> np.ndarray:
    """Read a uint8 array of `n_dims` dimensions: first the header, then no more than the elements that it announces.

    A file that is not a whole, undamaged IDX file of that kind raises ValueError, which names the file, the cause and
    the cure.
    """
    packed = path.suffix == ".gz"
    try:
        with open_regular(path) as regular, gzip.open(regular) if packed else regular as file:
            shape = _read_header(path, file, n_dims)
            _check_size(path, shape, packed, header_nbytes=file.tell())
            elements = np.empty(math.prod(shape), np.uint8)
            n_found = _fill(file, elements.data)
            if n_found < elements.size or file.read(1):
                raise ValueError(_mismatch(path, shape, str(n_found) if n_found < elements.size else "more"))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from error
    return elements.reshape(shape)


def _read_header(path: Path, file: Reader, n_dims: int) -> tuple[int, ...]:
    """Return the shape that the header announces."""
    header = file.read(4 + 4 * n_dims)
    if len(header) < 4 + 4 * n_dims:
        raise ValueError(f"{path} ends after {len(header)} bytes, inside its header; fetch it again")
    if header[:4] != bytes((0, 0, _UINT8, n_dims)):
        raise ValueError(
            f"{path} starts with {header[:4].hex()}, but an IDX file of uint8 in {n_dims} dimensions starts with "
            f"0000{_UINT8:02x}{n_dims:02x}; put the right file there"
        )
    return tuple(np.frombuffer(header, ">u4", offset=4).tolist())


def _check_size(path: Path, shape: tuple[int, ...], packed: bool, header_nbytes: int) -> None:
    """Compare the announced size with the size on the disk, before memory is taken for it."""
    announced, on_disk = math.prod(shape), path.stat().st_size
    if not packed and announced != on_disk - header_nbytes:
        raise ValueError(_mismatch(path, shape, str(on_disk - header_nbytes)))
    if packed and announced > max(_SMALL_NBYTES, _MOST_GZIP_RATIO * on_disk):
        raise ValueError(
            f"{path} announces {' x '.join(map(str, shape))} elements in {on_disk} packed bytes, as no images are; "
            "fetch it again, or unpack it if that is what it holds"
        )


def _fill(file: Reader, elements: memoryview) -> int:
    """Read until the elements are there or the file ends; returns how many were read."""
    n_found = 0
    while block := file.read(min(_BLOCK_NBYTES, len(elements) - n_found)):
        elements[n_found : n_found + len(block)] = block
        n_found += len(block)
    return n_found


def _mismatch(path: Path, shape: tuple[int, ...], found: str) -> str:
    announced = " x ".join(map(str, shape))
    return f"{path} announces {announced} elements but holds {found}; it is damaged: fetch it again"
