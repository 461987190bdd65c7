"""JSON records on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpicomp.checkpoint.atomic_file import replacing

Record = dict[str, Any]
"""What can be written as JSON."""


def write_record(path: Path, record: Record) -> None:
    """Write a record whole or not at all: a record that is there need not be measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def read_record(path: Path) -> Record:
    """The record of a file."""
    found: Record = json.loads(path.read_text())
    return found
