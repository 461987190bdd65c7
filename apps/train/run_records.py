"""Read the JSON lines that a training run writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.json_file import fields, parse_json
from collectives.regular_file import open_regular

Record = dict[str, Any]
CURE = "write it with apps.train --json"
MOST_DIGITS = 40
"""Digits of the integers in options; the seed of a method may have 20."""
_SETTINGS = {
    "algorithm": str,
    "algorithm_options": dict,
    "dataset": str,
    "model": str,
    "ranks": int,
    "optimizer": str,
    "lr": float,
}
_EPOCH = {"epoch": int, "accuracy": float, "bytes_so_far_per_rank": float, "seconds_so_far": float}


def read_run(path: Path) -> list[Record]:
    """Read the record of one run: a list of its lines.

    A file that holds no run of ``apps.train`` raises ValueError, which names the file, the cause and the cure.
    """
    records = []
    with open_regular(path) as file:
        text = file.read().decode("utf-8", "replace")  # bytes that are no text become a line that is no JSON
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            records.append(fields(parse_json(line, most_digits=MOST_DIGITS), kind=str))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no line of a training run ({error}); {CURE}") from error
    if not records:
        raise ValueError(f"{path} holds no training run; {CURE}")
    return records


def epochs(name: str, records: Sequence[Record]) -> list[Record]:
    """The records of the epochs of the run `name`; ValueError if one has no accuracy or no cost."""
    return [_checked(name, record, _EPOCH) for record in records if record["kind"] == "epoch"]


def settings(name: str, records: Sequence[Record]) -> Record:
    """The first record of the run `name` that has its settings; others may come before, such as measured links."""
    for record in records:
        if "algorithm" in record and "dataset" in record:
            return _checked(name, record, _SETTINGS)
    raise ValueError(f"{name} holds no epoch of a training run; {CURE}")


def _checked(name: str, record: Record, types: dict[str, type]) -> Record:
    try:
        return fields(record, **types)
    except ValueError as error:
        raise ValueError(f"{name} holds a record of another program ({error}); {CURE}") from error
