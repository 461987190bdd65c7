"""Results of studies on disk, so that a study that was cut off continues where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from apps.records import Record, read_record, write_record


class Results:
    """The folder of the results of one paper, each in a JSON file; `fresh`: those that are there are made again."""

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Parts of a study share results, so that only files that are there now count as old.
        self._old = {path: _version(path) for path in folder.glob("*.json")} if fresh else {}

    def kept(self, name: str, settings: Record) -> Record | None:
        """Return the result of the file `name`; None if the file is missing or has other settings."""
        path = self.folder / f"{name}.json"
        if not path.exists() or self._old.get(path) == _version(path):
            return None
        known = _read(path)
        return dict(known["result"]) if known["settings"] == json.loads(json.dumps(settings)) else None

    def get(self, name: str, settings: Record, make: Callable[[], Record]) -> Record:
        """Return the result of the file `name`; `make` it if the file has other settings or is missing."""
        # the settings are all that the result depends on; a file with others is replaced, another program's is a
        # ValueError
        known = self.kept(name, settings)
        if known is not None:
            return known
        start = time.monotonic()
        result = make()
        record = {"settings": settings, "seconds": time.monotonic() - start, "result": result}
        write_record(self.folder / f"{name}.json", record)
        return result

    def seconds(self) -> float:
        """The time that all results took."""
        return sum(_read(path)["seconds"] for path in self.folder.glob("*.json"))


def slug(name: str) -> str:
    """The name of a method or model as a part of file names."""
    return name.lower().replace(",", "").replace(" ", "-").replace("/", "-")


def _version(path: Path) -> tuple[int, int]:
    """Inode and time of change, of which one differs once the file was replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _read(path: Path) -> Record:
    return read_record(path, settings=dict, seconds=float, result=dict)
