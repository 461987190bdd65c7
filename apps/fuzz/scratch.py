"""Files that readers get their inputs from, in memory where the machine has /dev/shm."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def folder(name: str = "") -> Path:
    """Return a folder of this process, which ends with it; with a `name` one within it."""
    if name:
        inner = folder() / name
        inner.mkdir()
        return inner
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = tempfile.mkdtemp(prefix="fuzz-", dir=shared)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def scratch_file(name: str, content: bytes) -> Path:
    """Return a file with this content, which takes the place of the last one of that name."""
    path = folder() / name
    path.write_bytes(content)
    return path
