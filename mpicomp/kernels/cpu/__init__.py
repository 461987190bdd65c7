"""Loops compiled by Numba: arrays in, the result last, no allocation, no validation.

Numba keeps what it has compiled, and compiles a function again where the file that it is in has changed. Kernels have
functions of other files compiled in. So all that is kept is dropped where any file of this folder has changed: ranks
would otherwise compute by different versions after an update of a checkout.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def drop_stale(folder: Path) -> None:
    """Remove what Numba keeps of a folder's kernels if a source has changed since this was last called.

    It does nothing where the folder cannot be written to, and reaches no other place that ``NUMBA_CACHE_DIR`` names.
    """
    found = ((file.name, file.stat()) for file in sorted(folder.glob("*.py")))
    sources = "\n".join(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in found)
    kept = folder / "__pycache__"
    stamp = kept / "sources.txt"
    with suppress(OSError):
        if stamp.exists() and stamp.read_text() == sources:
            return
        for index in kept.glob("*.nbi"):
            index.unlink(missing_ok=True)
        kept.mkdir(exist_ok=True)
        written = kept / f"sources.{os.getpid()}.tmp"
        written.write_text(sources)
        written.replace(stamp)


drop_stale(Path(__file__).parent)
