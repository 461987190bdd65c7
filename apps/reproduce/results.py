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
        self.folder, self._fresh = folder, fresh
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, settings: Record, make: Callable[[], Record]) -> Record:
        """Return the result of the file `name`; `make` it if there is none with these settings.

        The settings are everything that the result depends on. A file with others is replaced, and one of another
        program raises ValueError.
        """
        path = self.folder / f"{name}.json"
        settings = json.loads(json.dumps(settings))
        if path.exists() and not self._fresh:
            known = _read(path)
            if known["settings"] == settings:
                return dict(known["result"])
        start = time.monotonic()
        result = make()
        write_record(path, {"settings": settings, "seconds": time.monotonic() - start, "result": result})
        return result

    def seconds(self) -> float:
        """The time that all results took."""
        return sum(_read(path)["seconds"] for path in self.folder.glob("*.json"))


def slug(name: str) -> str:
    """The name of a method or model as a part of file names."""
    return name.lower().replace(",", "").replace(" ", "-")


def _read(path: Path) -> Record:
    return read_record(path, settings=dict, seconds=float, result=dict)
