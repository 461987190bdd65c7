"""A disk that is full for the files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from collectives import atomic_file

FULL = "/dev/full"  # the kernel answers each write with ENOSPC


@contextmanager
def full_disk() -> Iterator[None]:
    """Let each file of `collectives.atomic_file.replacing` fail with ENOSPC in this block, on any disk.

    The file is created under its hidden name first, so that its removal is tested too.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from apps.faults.full_disk import full_disk
    >>> from collectives.atomic_file import replacing
    >>> with TemporaryDirectory() as folder:
    ...     try:
    ...         with full_disk(), replacing(Path(folder) / "state") as file:
    ...             _ = file.write(bytes(100_000))
    ...     except OSError as error:
    ...         print(error.strerror, len(list(Path(folder).iterdir())))
    No space left on device 0
    """
    create = atomic_file.create_locked

    def create_without_room(path: Path) -> int:
        descriptor, full = create(path), os.open(FULL, os.O_WRONLY)
        os.dup2(full, descriptor, inheritable=False)
        os.close(full)
        return descriptor

    with replaced(atomic_file, "create_locked", create_without_room):
        yield


@contextmanager
def replaced(owner: object, name: str, value: Callable[..., object]) -> Iterator[None]:
    """Let a function or method be another one in this block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
