"""Shared memory of MPICH, which has a name in /dev/shm until MPI_Finalize, and for ever if ranks are killed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def unlink_mpich_memory() -> None:
    """Remove the name of the memory that MPICH 5 shares between the ranks of this node; MPI is initialized.

    MPI_Init returns after all ranks of the node have mapped this memory, and MPICH does not open it again.
    """
    with suppress(OSError):  # another rank has come first, or this system has no /proc
        for path in re.findall(r"/dev/shm/mpich_shm_\w+$", Path("/proc/self/maps").read_text(), re.MULTILINE):
            Path(path).unlink()
