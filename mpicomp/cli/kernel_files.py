"""Processor and memory, from files of the kernel."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def cpu_name() -> str:
    """Return the model of the processor."""
    return field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def field(path: Path, name: str) -> str:
    """Return the value behind ``name:`` in a file of the kernel; empty if it is missing."""
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1].strip() if found else ""


def kilobytes(path: Path, name: str) -> int:
    """Return the value behind ``name:`` in a file of the kernel, in kB; 0 if the kernel does not report it."""
    return int(field(path, name).removesuffix("kB") or 0)
