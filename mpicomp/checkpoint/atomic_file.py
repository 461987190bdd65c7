"""Files that are whole or not there at all, also when the machine stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def flushed(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which has reached the disk when the block ends.

    Raises
    ------
    OSError
        It cannot be written; names the file.
    """
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # a full disk is told without
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends, and is gone if the block fails.

    Raises
    ------
    OSError
        It cannot be written; names a file beside `path`.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with flushed(partial) as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Let the disk know the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
