"""Lines of JSON that ranks write at once, so that a killed rank leaves all lines up to its death."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Lines:
    """File of JSON lines that are written at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line, with the time of a clock that all processes of this machine share."""
        os.write(self._file, (json.dumps({"kind": kind, "time": time.monotonic(), **fields}) + "\n").encode())


class LineReader:
    """Reads the files of a job's ranks, such as ``rank-3.jsonl``, while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.processes: dict[int, int] = {}  # of each rank that has written a line of kind "start"

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the new lines, each with its rank; a line that has no end yet is left for the next call."""
        found = []
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            rank, offset = int(path.stem.partition("-")[2]), self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                row = json.loads(line)
                if row["kind"] == "start":
                    self.processes[rank] = row["pid"]
                found.append((rank, row))
        return found
