"""Table of the reports in ``docs/records/clusters``, for the page "Results of other clusters".

``python -m apps.clusters`` writes it into ``docs/results.md``. Reports come from ``mpicomp bench --report``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apps.appendices import publish
from apps.launch import PROJECT
from apps.records import read_record
from mpicomp.cli.cluster_report import markdown
from mpicomp.cli.cluster_report.validation import problems

PAGE = PROJECT / "docs" / "results.md"
FOLDER = PROJECT / "docs" / "records" / "clusters"
COLUMNS = (
    "report", "nodes", "nodes x ranks", "load per core", "links", "vector", "best dense, ms", "marsit", "relay",
    "training step, relay",
)  # fmt: skip


def rows(name: str, report: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each measured size of vectors; the first one has the machine."""
    about = [name, markdown.machine(report), markdown.ranks(report), f"{report['machine']['load_per_core']:g}"]
    about.append(markdown.links(report))
    found = []
    for entry in (entry for entry in report["allreduce"] if not entry["skipped"]):
        median = {call["name"]: call["median_s"] for call in entry["calls"]}
        best = entry["best_dense"]
        factors = [f"{median[best] / median[one]:.2f}" if one in median else "–" for one in ("marsit", "relay")]
        dense = f"{markdown.milliseconds(median[best])} ({best})"
        found.append([*about, f"{entry['bytes'] / 1e6:g} MB", dense, *factors, training(report) if about[0] else ""])
        about = [""] * len(about)
    return found


def training(report: Mapping[str, Any]) -> str:
    """Return how many times as fast as with exact means a step with Relay is, or why it was not measured."""
    median = {step["name"]: step["median_s"] for step in report["training"]["steps"]}
    skipped = report["training"]["skipped"]
    return f"{median['dense'] / median['relay']:.2f}" if median else markdown.SKIPPED.get(skipped, skipped)


def table(folder: Path = FOLDER) -> str:
    """Return the Markdown table of all reports of a folder.

    Raises
    ------
    ValueError
        A report is not valid.
    """
    lines = [COLUMNS, ["---"] * 6 + ["---:"] * 4]
    for path in sorted(folder.glob("*.json")):
        report = read_record(path)
        if found := problems(report):
            raise ValueError(f"{path.name}: {found[0]}")
        lines += rows(path.stem, report)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Write the table into the page; return the exit status."""
    argparse.ArgumentParser(prog="python -m apps.clusters", description=main.__doc__).parse_args()
    publish(PAGE, "clusters", table())
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
