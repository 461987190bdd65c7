"""What the doctor finds, one fact at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str  # what was looked at
    status: Status  # "warn": jobs run, but slowly or with less than they could; "FAIL": no job can run
    text: str  # what was found
    cure: str = ""  # empty where nothing needs doing

    def line(self) -> str:
        """Return the finding as the report prints it."""
        cure = f" -> {self.cure}" if self.cure else ""
        return f"{self.status:4}  {self.name:16}  {self.text}{cure}"


def examine(name: str, check: Callable[[], Finding], on_error: Status = "warn") -> Finding:
    """Return what `check` finds; an exception from it is a finding as well, for a doctor must not die of one."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever is broken on this machine is what the report is about
        return Finding(name, on_error, f"could not be examined: {type(error).__name__}: {error}")
