"""The slices of a thread that must answer soon."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

import pytest

from collectives.progress.scheduling import SLICE_S, shorten_slices


def test_the_calling_thread_alone_has_short_slices_and_keeps_its_niceness() -> None:
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    table = Path("/proc/thread-self/sched")
    if release < (6, 12) or not table.exists():
        pytest.skip("this Linux has no slices of a thread's own, or does not show them")
    found: list[tuple[bool, float, int]] = []

    def look() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        found.append((shorten_slices(), slice_s(table), os.getpriority(os.PRIO_PROCESS, 0)))

    before = slice_s(table)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(True, SLICE_S, 3)]
    assert slice_s(table) == before > SLICE_S


def slice_s(table: Path) -> float:
    """Of the calling thread."""
    line = next(line for line in table.read_text().splitlines() if line.startswith("se.slice"))
    return float(line.rpartition(":")[2]) / 1e9


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "m68k")
    assert not shorten_slices()
