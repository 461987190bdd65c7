"""Reader of IDX files, the format of MNIST and its successors, plain or gzipped.

Layout: two zero bytes, one byte naming the element type (8 = uint8), one byte with the number of dimensions, each
dimension as a big-endian uint32, then the elements, the last dimension fastest.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

_UINT8 = 8


def read_idx(path: Path, n_dims: int) -> np.ndarray:
    """Read a uint8 array of `n_dims` dimensions.

    Raises
    ------
    ValueError
        The file is not a whole, undamaged IDX file of that kind; names file, cause and cure.
    OSError
        The file cannot be read.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from error
    header_nbytes = 4 + 4 * n_dims
    if len(content) < header_nbytes:
        raise ValueError(f"{path} ends after {len(content)} bytes, inside its header; fetch it again")
    if content[:4] != bytes((0, 0, _UINT8, n_dims)):
        raise ValueError(
            f"{path} starts with {content[:4].hex()}, but an IDX file of uint8 in {n_dims} dimensions starts with "
            f"0000{_UINT8:02x}{n_dims:02x}; put the right file there"
        )
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=n_dims, offset=4))
    expected_nbytes = int(np.prod(shape, dtype=object))
    found_nbytes = len(content) - header_nbytes
    if found_nbytes != expected_nbytes:
        raise ValueError(
            f"{path} announces {' x '.join(map(str, shape))} elements but holds {found_nbytes}; it is damaged: "
            "fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_nbytes).reshape(shape)
