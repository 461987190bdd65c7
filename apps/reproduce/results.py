"""Results on disk, one JSON file each: a study that was cut off goes on where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from apps.records import Record, read_record, write_record


class Book:
    """The folder of one paper's results.

    Parameters
    ----------
    folder : Path
        Made where it is missing.
    fresh : bool
        Whether what is there already is made again.
    """

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self.folder, self._fresh = folder, fresh
        folder.mkdir(parents=True, exist_ok=True)

    def record(self, name: str, settings: Record, make: Callable[[], Record]) -> Record:
        """What was found with these settings, or what `make` finds now.

        Parameters
        ----------
        name : str
            Of the file.
        settings : dict
            All that the result depends on; JSON. A file with others is written anew.
        make : callable
            Returns the result; JSON.
        """
        path = self.folder / f"{name}.json"
        settings = json.loads(json.dumps(settings))
        if path.exists() and not self._fresh:
            known = read_record(path)
            if known["settings"] == settings:
                return dict(known["result"])
        start = time.monotonic()
        result = make()
        whole = {"settings": settings, "seconds": time.monotonic() - start, "result": result}
        write_record(path, whole)
        return result

    def seconds(self) -> float:
        """That all results took."""
        return sum(read_record(path)["seconds"] for path in self.folder.glob("*.json"))
