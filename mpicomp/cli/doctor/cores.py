"""Cores that a control group lets its processes use: a container sees all of its host's."""

from __future__ import annotations

import math
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def quota(root: Path = ROOT, own: Path = OWN) -> float:
    """Return how many cores' time the processes of this container may take; infinity where nothing limits them."""
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
    """Return the folder of a group and those of the groups around it, as far as this container sees them."""
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
