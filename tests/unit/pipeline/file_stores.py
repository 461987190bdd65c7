"""Helpers for tests of stores in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpicomp.pipeline import FileMessageStore
from mpicomp.pipeline.store_file import PAGE


def opened(path: Path, fingerprint: str = "run", examples: int = 5, **options: Any) -> FileMessageStore:
    return FileMessageStore(path, examples, 6, fingerprint=fingerprint, **options)


def filled(path: Path) -> None:
    """Make a store with rows 1 and 3, which hold 1 and 3."""
    with opened(path) as store:
        store.write([1, 3], rows_of(1, 3))


def rows_of(*values: float) -> Any:
    return np.repeat(np.array(values, np.float32), 6).reshape(-1, 6)


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def row_offset(row: int) -> int:
    return 2 * PAGE + row * 24
