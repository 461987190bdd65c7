"""Figures of the emulated cluster: their marks, titles and texts against the data, which is kept next to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from apps.figures import DATA
from apps.performance.cluster import picture_data, plots, step_plots
from apps.performance.cluster.implementations import MPI_DEFAULT
from tests.unit.apps.performance.test_cluster_records import cell, grid_of_records, overlap_record

KEPT = picture_data.read(DATA / picture_data.NAME)
FULL = KEPT["grid"]


def title_of(figure: Figure | None) -> str:
    assert figure is not None
    text = re.sub(r"\s", " ", figure.get_suptitle())
    plt.close(figure)
    return text


def of_cell(rate: str, nbytes: int) -> dict[str, Any]:
    (found,) = [one for one in FULL if one["settings"]["rate"] == rate and one["settings"]["bytes"] == nbytes]
    return found


def best_dense_s(record: dict[str, Any]) -> float:
    compressed = ("one-bit ring", "Marsit ring")
    return min(timed["median_s"] for name, timed in record["timings"].items() if name not in compressed)


def test_the_speed_up_of_the_title_is_that_of_the_data() -> None:
    record = of_cell("1gbit", 100_000_000)
    gain = best_dense_s(record) / record["timings"]["Marsit ring"]["median_s"]
    title = title_of(plots.speedup_by_rate(FULL))
    assert title == f"Marsit's all-reduce of 100 MB is {gain:.0f} times as fast as the best dense one at 1 Gbit/s"

    slower = [record | {"timings": {**record["timings"], "Marsit ring": {"median_s": best_dense_s(record) / 5}}}]
    assert plots.speedup_title(slower).startswith("Marsit's all-reduce of 100 MB is 5.0 times as fast")


def test_the_speed_up_is_drawn_at_each_rate_below_the_limit_and_flattered_points_are_hollow() -> None:
    figure = plots.speedup_by_rate(FULL)
    assert figure is not None
    (axes,) = figure.axes
    lines = {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert list(lines) == ["100 MB vectors", "1 MB vectors", "64 kB vectors"]
    expected = [
        best_dense_s(of_cell(rate, 64_000)) / of_cell(rate, 64_000)["timings"]["Marsit ring"]["median_s"]
        for rate in ("100mbit", "1gbit", "10gbit", "none")
    ]
    assert list(lines["64 kB vectors"].get_ydata()) == pytest.approx(expected)
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == sum(
        of_cell(rate, n)["flattered"] for rate in ("100mbit", "1gbit") for n in (1_000_000, 64_000)
    )
    written = [text.get_text() for text in axes.texts]
    assert "32× is the limit: 1 bit in place of 32" in written
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "no limit (33 Gbit/s)"]
    plt.close(figure)


def test_titles_of_the_other_figures_have_the_data_s_numbers() -> None:
    assert title_of(plots.time_by_size(FULL)) == "From 1 MB on, Marsit's all-reduce is the fastest at every rate"
    waits = []
    for rate in ("100mbit", "none"):
        timed = of_cell(rate, 100_000_000)["timings"]["Marsit ring"]
        waits.append(100 * timed["cost"]["seconds_waiting"] / timed["elapsed_s"])
    expected = f"Marsit waits for the link {waits[0]:.0f} % of a call at 100 Mbit/s, {waits[1]:.0f} % without a limit"
    assert title_of(plots.stages(FULL)) == expected
    at = {record["settings"]["rate"]: record["overlap"] for record in KEPT["overlap"]}
    title = title_of(plots.overlap_by_rate(KEPT["overlap"]))
    assert f"{100 * at['500mbit']:.0f} % of its computing behind sending at 500 Mbit/s" in title
    assert f"{100 * at['8gbit']:.0f} % of its sending behind computing at 8 Gbit/s" in title


def test_the_note_names_the_lines_that_lie_on_each_other_and_where() -> None:
    def record(rate: str, nbytes: int, *others_s: float) -> dict[str, Any]:
        timings = dict(zip((plots.DENSE_RING, MPI_DEFAULT, plots.GLOO), others_s, strict=True))
        found = of_cell(rate, nbytes)
        return found | {"timings": {name: {"median_s": one} for name, one in timings.items()}}

    apart, equal, alike = (1.0, 1.0, 1.2), (1.0, 1.0, 1.0), (1.1, 1.0, 1.05)
    sizes = (64_000, 1_000_000, 16_000_000)
    slow = [record("100mbit", n, *times) for n, times in zip(sizes, (apart, equal, alike), strict=True)]
    fast = [record("1gbit", n, *times) for n, times in zip(sizes, (equal, equal, apart), strict=True)]
    text = " The lines of dense, Open MPI and Gloo coincide from 1 MB on at 100 Mbit/s."
    assert plots.name_coinciding([slow, fast]) == text
    assert plots.name_coinciding([fast]) == ""
    figure = plots.time_by_size(FULL)
    assert figure is not None
    assert "coincide from 1 MB on at 100 Mbit/s and 1 Gbit/s." in re.sub(r"\s", " ", figure.get_supxlabel())
    plt.close(figure)


def test_a_size_at_which_another_is_faster_at_one_rate_does_not_count_as_won() -> None:
    changed = [one | {"timings": dict(one["timings"])} for one in FULL]
    for one in changed:
        if one["settings"] == {"nodes": 4, "rate": "10gbit", "between": "none", "bytes": 16_000_000}:
            one["timings"]["Gloo"] = {"median_s": 1e-3}
    assert title_of(plots.time_by_size(changed)).startswith("From 100 MB on")


def test_methods_are_sorted_and_marked_at_each_rate() -> None:
    figure = step_plots.calls(KEPT["methods"])
    (axes,) = figure.axes
    fast, slow = ({r["settings"]["rate"]: r["rows"] for r in KEPT["methods"]}[rate] for rate in ("1gbit", "100mbit"))
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == sorted(fast, key=lambda name: fast[name]["median_s"])
    marks = [(line.get_xdata()[0], line.get_markerfacecolor()) for line in axes.lines if len(line.get_xdata()) == 1]
    assert marks[0][0] == fast[names[0]]["median_s"]
    assert marks[1] == (slow[names[0]]["median_s"], "white")
    gains = [rows["dense"]["median_s"] / rows["Marsit"]["median_s"] for rows in (fast, slow)]
    expected = (
        f"Marsit's all-reduce is {gains[0]:.0f} times as fast as dense at 1 Gbit/s, {gains[1]:.0f} times at 100 Mbit/s"
    )
    assert title_of(figure) == expected


def test_overlap_saves_a_part_of_a_step() -> None:
    rows = [
        {"method": "Marsit", "batch": batch, "backward_s": 0.1 * batch, "communication_s": 0.1, "both_s": both}
        for batch, both in ((1, 0.15), (2, 0.3), (4, 0.6))
    ]
    record = {"settings": {"nodes": 2, "rate": "1gbit", "between": "none"}, "n": 3000, "rows": rows}
    gains = step_plots.overlap_gains([record])
    assert [(row["length"], round(row["saved"])) for row in gains] == [("short", 25), ("medium", 0), ("long", -20)]
    figure = step_plots.saved_by_overlap([record])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[:2] == ["Marsit, 1 Gbit/s", "25 %: 100 ms + 100 ms → 150 ms"]
    assert texts[3] == "\N{MINUS SIGN}20 %: 400 ms + 100 ms → 600 ms"
    assert title_of(figure) == "Sending during backward saves up to 25 % of a step with Marsit at 1 Gbit/s"
    dense = KEPT["backward"][0]["rows"][:3]
    most = max(100 * (1 - row["both_s"] / (row["backward_s"] + row["communication_s"])) for row in dense)
    title = title_of(step_plots.saved_by_overlap(KEPT["backward"]))
    assert title.endswith(f"{most:.0f} % of a step with dense at 1 Gbit/s, nothing with DoubleSqueeze at 1 Gbit/s")


def test_training_seconds_are_those_to_one_accuracy() -> None:
    at = {record["settings"]["rate"]: {row["method"]: row["to_goal_s"] for row in record["rows"]}
          for record in KEPT["training"]}  # fmt: skip
    least, most = (at["100mbit"]["dense"] / at["100mbit"][f"Marsit, K = {period}"] for period in ("100", "none"))
    title = title_of(step_plots.seconds_to_goal(KEPT["training"]))
    assert (
        title
        == f"Training with Marsit reaches 86 % accuracy {least:.1f} to {most:.1f} times as fast as dense at 100 Mbit/s"
    )
    missed = [dict(row, to_goal_s=None) for row in KEPT["training"][0]["rows"]]
    figure = step_plots.seconds_to_goal([KEPT["training"][0] | {"rows": missed}])
    assert [text.get_text() for text in figure.axes[0].texts] == ["not reached"] * len(missed)
    assert title_of(figure) == "Training seconds to 86 % of test accuracy"


def test_kept_data_is_the_drawn_part_of_records_and_other_parts_stay(tmp_path: Path) -> None:
    overlaps = [overlap_record(2, mbit) for mbit in (500, 1000, 2000)]
    parts = picture_data.condense(grid_of_records(), overlaps, [], [], [])
    assert list(parts) == ["grid", "overlap"]
    assert len(parts["grid"]) == 9  # those of four nodes alone
    one = parts["grid"][0]
    assert set(one["timings"]) == {
        "one-bit ring",
        "Marsit ring",
        "dense ring",
        "MPI default",
        "Gloo",
        "MPI Rabenseifner",
    }
    assert set(one["timings"]["Marsit ring"]["cost"]) == {
        "seconds_encoding", "seconds_merging", "seconds_decoding", "seconds_waiting",
    }  # fmt: skip
    path = tmp_path / "data" / "cluster.json"
    picture_data.update(path, parts)
    assert picture_data.read(path) == parts
    picture_data.update(path, {"overlap": parts["overlap"][:1]})
    assert picture_data.read(path) == {"grid": parts["grid"], "overlap": parts["overlap"][:1]}
    drawn = [picture.name for picture in picture_data.draw_parts(parts, tmp_path)]
    assert drawn == ["cluster-time.png", "cluster-speedup.png", "cluster-stages.png", "cluster-overlap.png"]
    assert picture_data.draw_parts({}, tmp_path) == []


def test_a_part_that_was_measured_again_keeps_where_the_others_come_from(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"source": "a page", "grid": [], "methods": []}')
    picture_data.update(path, {"grid": [cell()]})
    assert f'"{picture_data.MEASURED}; methods: a page"' in path.read_text()


def test_kept_data_has_the_tables_numbers() -> None:
    page = (DATA.parents[1] / "performance-tables.md").read_text()
    for record in FULL:
        timed = record["timings"]["Marsit ring"]["median_s"]
        size = record["settings"]["bytes"]
        row = rf"^\| {size // 1000 ** (2 if size >= 1e6 else 1)}{'MB' if size >= 1e6 else 'kB'}[ †]* \|[^|]*\| "
        found = re.findall(row + r"([\d.]+) \(", page, re.MULTILINE)
        assert f"{1e3 * timed:.10g}" in [f"{float(one):.10g}" for one in found]
