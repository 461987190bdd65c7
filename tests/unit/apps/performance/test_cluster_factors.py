"""Speed-ups that pages quote: over the best without compression, in one place, made of the figures' data."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from apps.appendices import replace_block
from apps.figures import DATA
from apps.frontier.cases import GRADIENTS
from apps.frontier.tasks import TASKS
from apps.frontier.verdict import best, judge
from apps.launch import PROJECT
from apps.performance.cluster import factors, picture_data
from apps.records import read_record

PARTS = picture_data.read(DATA / picture_data.NAME)
QUOTED = factors.format_quotes(PARTS)
FRONTIER = PROJECT / "docs" / "records" / "frontier"
TABLES = PROJECT / "docs" / "records" / "performance-tables"


def test_the_tables_of_the_page_are_those_of_the_data() -> None:
    text = factors.PAGE.read_text()
    made = {"factors": factors.all_reduces(PARTS["grid"]), "trainings": factors.trainings(PARTS["training"])}
    for name, body in made.items():
        assert replace_block(text, name, body) == text, "python -m apps.performance.cluster.factors"
    text, body = factors.CHOOSE.read_text(), factors.equal_steps(factors.RELAY.read_text())
    assert replace_block(text, "equal-steps", body) == text


def test_a_training_is_compared_with_exact_local_steps_too() -> None:
    def row(method: str, seconds: float) -> dict[str, Any]:
        return {"method": method, "to_goal_s": seconds, "accuracy": 0.86, "bytes_so_far_per_rank": 1e6}

    record = {"settings": {"nodes": 4, "rate": "1gbit", "between": "none"}}
    record["rows"] = [row("dense", 8.0), row("dense, every 8 local steps", 4.0), row("Marsit, K = 100", 5.0)]
    (_, _, marsit) = factors.training_rows(record)
    assert (marsit["over every step"], marsit["over local steps"]) == (1.6, 0.8)
    assert factors.trainings([record]).splitlines()[-1].endswith("| 1.6 | 0.80 |")


def test_methods_are_compared_at_equal_local_steps() -> None:
    page = "## Speed\n\n| | Relay, 4 levels | 2 levels | Marsit | best dense |\n|---|---:|---:|---:|---:|\n"
    page += "| 4 ranks | 1 | | 1 | 1 |\n| 4 ranks, 1 Gbit/s | 100.0 | | 40 | 1000 |\n"
    rows = [line.split(" | ") for line in factors.equal_steps(page).splitlines()[2:]]
    assert rows[0] == ["| 1 Gbit/s", "1", "1200", "4.00", "5.00 |"]
    assert rows[1] == ["| 1 Gbit/s", "10", "300", f"{300 / 210:.2f}", f"{300 / 204:.2f} |"]
    assert len(rows) == 3


def test_prices_that_are_quoted_are_those_of_the_record() -> None:
    record = json.loads((PROJECT / "docs" / "records" / "frontier" / "price.json").read_text())
    rows = {(row["method"], row["local_steps"]): row for row in record["rows"] if row["ranks"] == 4}
    text = " ".join(factors.CHOOSE.read_text().split())
    for method, steps in (("Relay(4)", 10), ("Relay(4)", 30), ("Relay(4)", 100), ("Relay(16)", 0), ("Relay(4)", 0)):
        assert f"{rows[method, steps]['price']:+.3f}".lstrip("+").replace("-", "−") in text
    few, many = rows["Relay(4)", 10], rows["Relay(4)", 30]
    loss = {key: sum(row["losses"]) / len(row["losses"]) for key, row in rows.items()}
    share = (loss["Marsit", 10] - loss["Relay(4)", 10]) / (loss["Relay(4)", 30] - loss["Relay(4)", 10])
    two_bits = few["bytes"] * (many["bytes"] / few["bytes"]) ** share / 1e6
    sent = f"it sent {rows['Marsit', 10]['bytes'] / 1e6:.2f} MB"
    assert f"With H = 10 {sent} for a loss that two bits reach with {two_bits:.1f}." in text


def test_other_pages_quote_the_figures_of_the_one_place() -> None:
    one, ten = QUOTED["100 MB at 1gbit"], QUOTED["100 MB at 10gbit"]
    slow, fast = (QUOTED[f"Marsit, K = 100 at {rate}, local steps"] for rate in ("100mbit", "1gbit"))
    readme, faq = (" ".join((PROJECT / name).read_text().split()) for name in ("README.md", "docs/faq.md"))
    (cells,) = re.findall(r"^\| 100MB (.*)$", factors.PAGE.read_text(), re.MULTILINE)
    defaults = " | ".join(re.findall(r"\| ([\d.]+)", cells)[:3])
    assert f"all-reduce](docs/performance.md#factors) of 100 MB by `Marsit()` | {defaults} |" in readme
    details = (PROJECT / "docs" / "performance-details.md").read_text()
    (cells,) = re.findall(r"^\| transformer: Marsit \|(.*)\|$", details, re.MULTILINE)
    steps = [100 / (99 / float(cell) + 1) for cell in cells.split("|")[:3]]  # one of 100 is in full precision
    assert f"11 million parameters, by `Marsit()` | {' | '.join(f'{step:.1f}' for step in steps)} |" in readme
    assert float(fast) < 1
    assert f"was {one} times as fast as the best dense one at 1 Gbit/s, and {ten} times at 10 Gbit/s" in faq
    every = [QUOTED[f"Marsit, K = 100 at {rate}, every step"] for rate in ("100mbit", "1gbit")]
    assert f"{every[0]} times as fast as averaging at every step at 100 Mbit/s, and {every[1]} times" in faq
    assert f"it was {slow} and {fast} times" in faq
    for text in (readme, faq):
        assert f"{QUOTED['100 MB at none']} at 33 Gbit/s" in text.replace(" times at", " at")


def test_the_first_factors_are_those_of_the_record_of_time_bytes_and_loss() -> None:
    factors_of: dict[tuple[str, bool], list[float]] = {}
    for task in TASKS.values():
        times = read_record(FRONTIER / f"times-{task.name}.json")
        for one in judge(read_record(FRONTIER / "learning.json"), task, range(3), times)["ranking"]:
            dense, ours = best(one, True), best(one, False)
            assert dense is not None
            assert ours is not None
            factors_of.setdefault((one["rate"], one["goal_of"] == GRADIENTS), []).append(dense[1] / ours[1])
    readme, choose = (" ".join(page.read_text().split()) for page in (PROJECT / "README.md", factors.CHOOSE))
    for (rate, of_every_step), found in factors_of.items():
        assert len(found) == (3 if of_every_step else 6)
        ends = f"{min(found):.1f} to {max(found):.1f}"
        assert ends in readme, (rate, of_every_step)
        assert ends in choose, (rate, of_every_step)


@pytest.mark.parametrize("name", ["cluster-sizes", "cluster-rates", "cluster-nodes"])
def test_factors_of_published_tables_are_over_the_fastest_without_compression(name: str) -> None:
    for part in json.loads((TABLES / f"{name}.json").read_text()):
        for cells in () if isinstance(part, str) else part["rows"]:
            row = dict(zip(part["columns"], cells, strict=True))
            found = {column: re.match(r"[\d.]+", cell) for column, cell in row.items()}
            times = {column: float(one[0]) for column, one in found.items() if one}
            dense = [times[f"{way}, ms"] for way in ("dense ring", "best of Open MPI", "Gloo") if f"{way}, ms" in times]
            for way in ("one-bit", "Marsit") if dense else ():
                factor = min(dense) / times[f"{way} ring, ms"]
                assert times[f"{way} over it"] == pytest.approx(factor, rel=0.1 if min(dense) < 1 else 0.02)
