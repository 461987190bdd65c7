"""Processes of the tests, which see them although these are in namespaces of their own."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def processes() -> list[int]:
    """All that run now."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def arguments(pid: int) -> list[str]:
    """Command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def link(pid: int, name: str) -> str:
    """Return the target of a link of a process, empty if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/{name}").readlink())
    except OSError:
        return ""


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, in any way."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
