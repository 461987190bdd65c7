"""Speed-ups that pages quote, of the data of the figures: ``python -m apps.performance.cluster.factors`` writes them.

Those of all-reduces and trainings stand in ``docs/performance.md``, and are made of ``docs/figures/data/cluster.json``;
those of steps with equal local steps in ``docs/choose.md``, of the times of ``docs/relay-record.md``. The baseline is
the fastest without compression in the same run; of whole trainings, with local steps and without.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from apps.appendices import parse, publish
from apps.figures import DATA
from apps.launch import PROJECT
from apps.performance.cluster import picture_data, ratios
from apps.performance.cluster.grid import size_text
from apps.performance.cluster.implementations import MARSIT_RING
from apps.performance.cluster.records import cluster_of
from apps.performance.cluster.tables import ABSENT
from apps.performance.part import Column, table
from apps.records import Record
from collectives.cost.rate import Rate

PAGE, CHOOSE, RELAY = (PROJECT / "docs" / name for name in ("performance.md", "choose.md", "relay-record.md"))
DEFAULT, WITHOUT = "Marsit, K = 100", "Marsit, K = none"
COMPUTED_MS, LOCAL_STEPS = 200.0, (1, 10, 30)
"""Computing time of a step, and steps from one exchange to the next, of `equal_steps`."""
LOCAL = "local steps"
"""Part of the names of trainings that average exactly after several steps."""


def all_reduces(cells: Sequence[Record]) -> str:
    """Return a table of Marsit's speed-ups by size and rate: of the defaults, and without full-precision rounds."""
    by_rate: dict[str, dict[int, Record]] = {}
    for record in cells:
        by_rate.setdefault(_rate(record), {})[record["settings"]["bytes"]] = record
    columns: list[Column] = [("vector", size_text)]
    columns += [(rate, partial(_cell, of)) for rate, of in by_rate.items()]
    return table(columns, sorted({nbytes for of in by_rate.values() for nbytes in of}))


def trainings(records: Sequence[Record]) -> str:
    """Return a table of seconds to the same accuracy, and of each method's speed-up over both exact trainings."""
    columns: list[Column] = [("links", itemgetter("links")), ("method", itemgetter("method"))]
    columns.append(("MB sent by a rank", lambda row: f"{row['bytes_so_far_per_rank'] / 1e6:.4g}"))
    columns.append(("accuracy", lambda row: f"{row['accuracy']:.2%}"))
    columns.append(("seconds to the goal", lambda row: f"{row['to_goal_s']:.0f}"))
    columns.append(("over dense at every step", lambda row: f"{row['over every step']:.1f}"))
    columns.append(("over exact local steps", lambda row: f"{row['over local steps']:.2f}"))
    return table(columns, [row for record in records for row in training_rows(record)])


def training_rows(record: Record) -> list[dict[str, Any]]:
    """Return the rows of one rate with their speed-ups over the exact trainings."""
    exact = [row for row in record["rows"] if "Marsit" not in row["method"]]
    local = min(row["to_goal_s"] for row in exact if LOCAL in row["method"])
    every = min(row["to_goal_s"] for row in exact if LOCAL not in row["method"])
    return [
        row | {
            "links": _rate(record),
            "over every step": every / row["to_goal_s"],
            "over local steps": local / row["to_goal_s"],
        }
        for row in record["rows"]
    ]  # fmt: skip


def equal_steps(page: str) -> str:
    """Return a table of steps that exchange every H of them: dense, by Relay and by Marsit, from the page's times."""
    times = next(part for part in parse(page.partition("## Speed")[2]) if not isinstance(part, str))
    columns: list[Column] = [("links", itemgetter(0)), ("steps between exchanges", lambda row: str(row[1]))]
    columns += [("best dense, ms", lambda row: f"{row[2]:.0f}")]
    columns += [(f"{name} over it", partial(_gain, place)) for place, name in ((3, "Relay, 4 levels"), (4, "Marsit"))]
    linked = [row for row in map(list, times["rows"]) if "bit/s" in row[0]]
    rows = [
        (row[0].removeprefix("4 ranks, ").removeprefix("emulated links of "), every, *_step_ms(row, every))
        for row in reversed(linked)
        for every in LOCAL_STEPS
    ]
    return table(columns, rows)


def format_quotes(parts: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """Return the figures that other pages quote, as they write them."""
    cells = {(one["settings"]["rate"], one["settings"]["bytes"]): one for one in parts["grid"]}
    found = {rate: ratios.default_speedup(cells[rate, 100_000_000]) or 0.0 for rate in ("1gbit", "10gbit", "none")}
    quotes = {f"100 MB at {rate}": f"{gain:.0f}" if gain >= 10 else f"{gain:.1f}" for rate, gain in found.items()}
    for record in parts["training"]:
        for row in training_rows(record):
            if row["method"] in (DEFAULT, WITHOUT):
                key = f"{row['method']} at {record['settings']['rate']}"
                quotes |= {f"{key}, every step": f"{row['over every step']:.1f}"}
                quotes |= {f"{key}, local steps": f"{row['over local steps']:.2f}"}
    return quotes


def write() -> None:
    """Put the tables into the page."""
    parts = picture_data.read(DATA / picture_data.NAME)
    publish(PAGE, "factors", all_reduces(parts["grid"]))
    publish(PAGE, "trainings", trainings(parts["training"]))
    publish(CHOOSE, "equal-steps", equal_steps(RELAY.read_text()))


def _step_ms(row: Sequence[str], every: int) -> list[float]:
    """Return the steps of dense, Relay and Marsit, of a row with the times of their exchanges."""
    return [COMPUTED_MS + float(row[place]) / every for place in (4, 1, 3)]


def _gain(place: int, row: Sequence[float]) -> str:
    return f"{row[2] / row[place]:.2f}"


def _rate(record: Record) -> str:
    bits_per_s = cluster_of(record).bits_per_s
    return str(Rate(bits_per_s)) if bits_per_s is not None else "no limit"


def _cell(by_size: Mapping[int, Record], nbytes: int) -> str:
    record = by_size.get(nbytes)
    if record is None or (default := ratios.default_speedup(record)) is None:
        return ABSENT
    without = ratios.speedup(record, MARSIT_RING, ratios.BEST_DENSE) or 0.0
    mark = " †" if record["flattered"] else ""
    return f"{_factor(default)} ({_factor(without)}){mark}"


def _factor(gain: float) -> str:
    return f"{gain:.1f}" if gain >= 0.95 else f"{gain:.2f}"


if __name__ == "__main__":
    write()
    sys.exit(0)
