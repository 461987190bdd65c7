"""Findings of the doctor, and their report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str  # the subject
    status: Status  # "warn": jobs run, but slowly or with less than they could; "FAIL": no job can run
    text: str
    cure: str = ""  # empty if nothing needs to be done

    def line(self) -> str:
        """Return the finding as the report prints it."""
        cure = f" -> {self.cure}" if self.cure else ""
        return f"{self.status:4}  {self.name:16}  {self.text}{cure}"


def examine(name: str, check: Callable[[], Finding], on_error: Status = "warn") -> Finding:
    """Return the finding of `check`. An exception becomes a finding, so that the other checks still run."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - any error on this machine belongs into the report
        return Finding(name, on_error, f"could not be examined: {type(error).__name__}: {error}")


def first_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: the first four, and how many more."""
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{more}"


def report(found: list[Finding], as_json: bool) -> int:
    """Print the findings; return the exit status."""
    if as_json:
        print(json.dumps({"can_run": status(found) == 0, "findings": list(map(asdict, found))}))
    else:
        print("\n".join(finding.line() for finding in found))
    return status(found)


def status(found: list[Finding]) -> int:
    """Return the exit status: 1 if no job can run."""
    return int(any(finding.status == "FAIL" for finding in found))
