"""The scripts behind docs/performance-tables.md: their helpers are right, and each runs in its small form."""

from __future__ import annotations

import json
import mmap
import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from apps.appendices import replace_block
from apps.environment import environment
from apps.launch import mpi_environment, python_command, run
from apps.performance import run_all
from apps.performance.cluster.measurements import MEASUREMENTS
from apps.performance.cluster.tables import NOTHING, tables
from apps.performance.compare_checkouts import COLUMNS, cluster_figures, compare, figures
from apps.performance.idle_memory import memory_scaling, passes
from apps.performance.memory import forget_peak, resident_bytes
from apps.performance.part import format_seconds, get, table
from apps.records import write_record

JOB_S = 150.0


def test_a_block_is_replaced_and_the_text_around_it_kept() -> None:
    text = "before\n<!-- begin a -->\nold\n<!-- end a -->\nafter <!-- begin b --><!-- end b -->"
    assert replace_block(text, "a", r"new \1") == text.replace("old", r"new \1")


@pytest.mark.parametrize(
    "text", ["", "<!-- begin a -->", "<!-- end a --><!-- begin a -->", "<!-- begin a --><!-- end a --><!-- end a -->"]
)
def test_a_document_without_a_place_for_a_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no one place for a"):
        replace_block(text, "a", "new")


def test_the_document_has_a_place_for_every_table() -> None:
    text, of_clusters = run_all.DOCUMENT.read_text(), tables([])
    assert set(of_clusters.values()) == {NOTHING}
    names = [*(job.name for job in run_all.jobs()), *of_clusters, *(f"cluster-{name}" for name in MEASUREMENTS)]
    for name in (*names, "cluster-figures"):
        assert replace_block(text, name, "other") != text


def test_a_table_has_a_cell_for_each_column_and_row() -> None:
    rows = [{"a": "x", "b": 0.25}, {"a": "y", "b": 2.0}]
    assert table((("a", get("a")), ("b", get("b", ".1f"))), rows).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| x | 0.2 |",
        "| y | 2.0 |",
    ]


@pytest.mark.parametrize(("seconds", "shown"), [(0.0012345, "1.23"), (0.012345, "12.3"), (1.2345, "1234")])
def test_times_have_three_digits_or_all_before_the_point(seconds: float, shown: str) -> None:
    assert format_seconds(seconds, 1e-3) == shown


def test_what_memory_gives_to_all_processors_is_held_against_what_it_gives_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def noted(vectors: list[NDArray[np.float32]]) -> float:
        asked.append(len(vectors))
        return 10.0 * len(vectors) ** 0.5

    monkeypatch.setattr("apps.performance.idle_memory.passes", noted)
    cores = len(os.sched_getaffinity(0))
    assert memory_scaling() == pytest.approx(cores**0.5)
    assert set(asked) == {1, cores}


def test_a_machine_that_stalls_for_a_turn_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.performance.idle_memory._SCALING_S", -1.0)
    assert passes([np.ones(10, np.float32)] * 2) > 0


def test_passes_over_memory_are_counted_as_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that goes on by a second at each look: 4 passes until the limit, and 5 seconds in all."""
    monkeypatch.setattr("apps.performance.idle_memory.time", SimpleNamespace(perf_counter=count(1).__next__))
    monkeypatch.setattr("apps.performance.idle_memory._SCALING_S", 5)
    assert passes([np.ones(10, np.float32)]) == 4 / 5


def test_a_peak_of_memory_is_seen_after_it_is_over() -> None:
    forget_peak()
    before = resident_bytes()
    with mmap.mmap(-1, 64_000_000) as fresh:  # an array could come to lie in memory that other tests freed
        fresh[:: mmap.PAGESIZE] = bytes(len(range(0, len(fresh), mmap.PAGESIZE)))
    assert 60e6 < resident_bytes("VmHWM") - before < 100e6


def test_figures_that_both_checkouts_have_are_compared_in_turn(tmp_path: Path) -> None:
    def read(seconds: float) -> dict[tuple[str, ...], float]:
        row = {"call": "ring", "median_s": seconds, "more": {"median_s": 1.0}, "cost": None}
        write_record(tmp_path / "record.json", {"rows": [row]})
        return dict(figures("allreduce", tmp_path / "record.json"))

    old, new = ([read(seconds) for seconds in of_one] for of_one in ((2.0, 4.0), (1.0, 5.0)))
    assert list(old[0]) == [("allreduce", "ring", ""), ("allreduce", "ring", "more")]
    old[0] |= {("allreduce", "gone", ""): 1.0}
    ring, more = compare(old, new)
    assert (ring["old"], ring["new"], ring["ratio"], ring["each"]) == (3.0, 3.0, 1.0, [2.0, 0.8])
    assert more["ratio"] == 1


@pytest.mark.parametrize(
    ("call", "is_control"), [("mpicomp", False), ("MPI ring", True), ("MPI_Allreduce", True), ("mpi", True)]
)
def test_only_calls_of_other_libraries_are_noise(call: str, is_control: bool) -> None:
    columns = dict(COLUMNS)
    row = {"key": ("torch-backend", "all_reduce", call), "old": 1.0, "new": 2.0, "ratio": 0.5, "each": [0.5]}
    assert columns[""](row) == ("noise" if is_control else "**slower**")


def test_figures_of_a_cluster_are_named_by_their_places_in_all_records_but_parts(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    write_record(tmp_path / "4x1gbit.json", {"timings": {"ring": {"median_s": 2.0}}, "links": [{"bits_per_s": 1e9}]})
    write_record(tmp_path / "model.json", {"rows": [{"name": "dense", "step": {"median_s": 3.0}}]})
    write_record(tmp_path / "parts" / "4x1gbit.0.json", {"timings": {"ring": {"median_s": 9.0}}})
    assert dict(cluster_figures("cluster-grid", tmp_path)) == {
        ("cluster-grid", "4x1gbit", "ring"): 2.0,
        ("cluster-grid", "model", "dense, step"): 3.0,
    }


def fill_place(job: run_all.Job, path: Path, printed: str) -> None:
    """Write the table into a copy of the document, where it equals the printed one."""
    document = path.with_suffix(".md")
    document.write_text(run_all.DOCUMENT.read_text())
    run_all.write_table(job, path, document)
    written = document.read_text().partition(f"<!-- begin {job.name} -->")[2].partition("<!-- end")[0]
    assert written.strip() in printed
    assert json.loads(path.read_text())["environment"]["cpu"] in written


@pytest.mark.parametrize("job", [job for job in run_all.jobs() if job.ranks is None], ids=lambda job: job.name)
def test_every_part_on_one_rank_runs_in_its_small_form_and_fills_its_place(
    job: run_all.Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    assert job.part.main(["--quick", "--json", str(path)]) == 0
    fill_place(job, path, capsys.readouterr().out)


# A rank prints to a file: in the job's output, a warning of another rank could stand amid a table.
PARTS = """
import sys
from contextlib import redirect_stdout
from importlib import import_module
from mpi4py import MPI
for module in sys.argv[2:]:
    with open(f"{sys.argv[1]}/{module}.{MPI.COMM_WORLD.rank}", "w") as printed, redirect_stdout(printed):
        import_module(f"apps.performance.{module}").PART.main(["--quick", "--json", f"{sys.argv[1]}/{module}.json"])
"""


@pytest.mark.timeout(2 * JOB_S)
def test_every_part_on_several_ranks_runs_in_its_small_form_and_fills_its_places(tmp_path: Path) -> None:
    jobs = [job for job in run_all.jobs() if job.ranks is not None]
    modules = dict.fromkeys([job.part.module for job in jobs] + ["in_flight"])
    command = python_command(2, ["-c", PARTS, str(tmp_path), *modules])
    status, output = run(command, mpi_environment(), timeout_s=JOB_S)
    assert status == 0, output
    for job in jobs:
        printed = (tmp_path / f"{job.part.module}.0").read_text()
        fill_place(job, tmp_path / f"{job.part.module}.json", printed)


@pytest.mark.timeout(2 * JOB_S)
def test_run_all_starts_a_part_as_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all.main(["--quick", "--only", "dense-sizes", "--json-dir", str(tmp_path)]) == 0
    assert "## dense-sizes\n\n| bytes | " in capsys.readouterr().out


def test_run_all_skips_what_is_measured_and_fails_where_a_part_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = {"kernels": 0, "memory": 3}
    started: list[str] = []

    def job(command: list[str], *__: object, **___: object) -> tuple[int, str]:
        arguments = command[command.index("-m") :]
        name = arguments[1].removeprefix("apps.performance.")
        started.append(name)
        if not statuses[name]:
            Path(arguments[arguments.index("--json") + 1]).write_text(
                json.dumps({"rows": [], "settings": {"n": 1}, "environment": environment()})
            )
        return statuses[name], "what it printed"

    monkeypatch.setattr(run_all, "run", job)
    monkeypatch.setattr(run_all.os, "nice", lambda _: 0)
    arguments = ["--quick", "--only", "kernels,memory", "--json-dir", str(tmp_path)]
    assert run_all.main(arguments) == 1
    printed = capsys.readouterr()
    assert "## kernels" in printed.out
    assert "memory ended with status 3\nwhat it printed" in printed.err
    statuses["memory"] = 0
    assert run_all.main(arguments) == 0
    assert started == ["kernels", "memory", "memory"]
