"""JSON records on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.atomic_file import replacing
from collectives.json_file import fields, read_json

_MOST_BYTES = 1 << 28
Record = dict[str, Any]
"""A dict that can be written as JSON."""


def write_record(path: Path, record: Record) -> None:
    """Write a record whole or not at all: a record that is there need not be measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def read_record(path: Path, /, **types: type | Sequence[type]) -> Record:
    """Read the record of a file with fields of these `types`; ValueError, one line with the cure, if it has others."""
    cure = "remove it to measure again"
    found = read_json(path, cure, most_bytes=_MOST_BYTES)
    try:
        return fields(found, **types)
    except ValueError as error:
        raise ValueError(f"{path} is not a record of this program ({error}); {cure}") from error
