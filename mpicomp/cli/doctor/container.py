"""Limits of a container: cores that it may use, and conditions without which MPI ends the process during its start."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from mpicomp.cli.doctor.finding import Finding

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def quota(root: Path = ROOT, own: Path = OWN) -> float:
    """Return the number of cores whose time this container may use; infinity without a limit."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return math.inf
    found = [math.inf]
    for _, controllers, path in groups:
        if not controllers:  # the second version
            found += [_limit(place / "cpu.max") for place in _up(root, path)]
        elif "cpu" in controllers.split(","):
            found += [
                _ratio(_text(place / "cpu.cfs_quota_us"), _text(place / "cpu.cfs_period_us"))
                for place in _up(root / "cpu", path)
            ]
    return min(found)


def _up(root: Path, path: str) -> list[Path]:
    """Return the folders of a group and of the groups around it that are visible in this container."""
    inner = root / path.lstrip("/")
    return [place for place in (inner, *inner.parents) if place.is_relative_to(root)]


def _limit(file: Path) -> float:
    limit, _, period = _text(file).partition(" ")
    return _ratio(limit, period)


def _ratio(limit: str, period: str) -> float:
    is_limited = limit.isdecimal() and period.isdecimal() and int(limit) and int(period)
    return int(limit) / int(period) if is_limited else math.inf


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


# Start of MPI --------------------------------------------------------------------------------------------------------


_CURE = "give the container more (docker run --shm-size=1g), or set OMPI_MCA_btl_sm_backing_directory=/tmp"
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_BYTES = 16 << 20  # that Open MPI takes for each rank of a host


def obstacles(environ: Mapping[str, str], folder: Path = SHARED_MEMORY) -> list[Finding]:
    """Return the obstacles to the start of MPI."""
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
