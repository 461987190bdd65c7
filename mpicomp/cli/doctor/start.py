"""Conditions without which MPI ends the process while it starts, before anything can be reported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mpicomp.cli.doctor.finding import Finding

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_BYTES = 16 << 20  # that Open MPI takes for each rank of a host


def findings(environ: Mapping[str, str], folder: Path = SHARED_MEMORY) -> list[Finding]:
    """Return the obstacles that there are; empty where MPI can start."""
    found = []
    if not environ.get("HOME"):
        text = "HOME is not set, without which Open MPI does not start"
        found.append(Finding("home", "warn", text, "export HOME=/tmp, or another folder that you may write"))
    ranks = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    needed = SEGMENT_BYTES * (int(ranks) if ranks.isdecimal() else 1)
    backing = Path(environ.get("OMPI_MCA_btl_sm_backing_directory", folder))
    try:
        status = os.statvfs(backing)
    except OSError as error:
        found.append(Finding("shared memory", "warn", f"{backing} cannot be used ({error.strerror})", _CURE))
        return found
    free = status.f_bavail * status.f_frsize
    if free < needed:
        text = f"{backing} has room for {free >> 20} MiB, and Open MPI takes {needed >> 20} MiB for the ranks of a host"
        found.append(Finding("shared memory", "warn", text, _CURE))
    return found


_CURE = "give the container more (docker run --shm-size=1g), or set OMPI_MCA_btl_sm_backing_directory=/tmp"
