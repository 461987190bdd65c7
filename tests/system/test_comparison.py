"""The comparison bench on hosts in namespaces: every all-reduce gives the right result, MPI's algorithm is switched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apps.emulator.link_speed import Measured
from apps.emulator.network import NAMESPACES, PREFIX
from apps.performance.cluster import methods, predicted
from apps.performance.cluster.driver import Limits, measure_alone, measure_cells, measure_missing
from apps.performance.cluster.grid import Cell, Cluster
from apps.performance.cluster.implementations import of_library

PROJECT = Path(__file__).resolve().parents[2]
NBYTES = 400_000
LIMIT_S, END_S = 600.0, 60.0  # of a command; of its end where it took longer
pytestmark = pytest.mark.timeout(LIMIT_S + 2 * END_S)


def compare(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Return the record of one small cell, and the printed text."""
    arguments = ["--sizes", "400kB", "--budget-s", "3", "--no-mpich", "--only", "grid,tables", *options]
    with subprocess.Popen(
        [sys.executable, "-m", "apps.performance.cluster", "--json-dir", str(folder), *arguments],
        cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it then removes its hosts
            output, _ = process.communicate(timeout=END_S)
            pytest.fail(f"not done in {LIMIT_S:g} s:\n{output}")
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert not list(NAMESPACES.glob(f"{PREFIX}{process.pid}-*"))
    (record,) = folder.glob("*.json")
    return json.loads(record.read_text()), output


@pytest.mark.timeout(2 * (LIMIT_S + 2 * END_S))
def test_all_implementations_are_right_and_timed_and_a_cell_is_measured_once(tmp_path: Path) -> None:
    # without a limit, which a busy machine could not keep
    record, output = compare(tmp_path, "--nodes", "3", "--rates", "none")
    known = {one.name: one for one in of_library("openmpi", 3)}
    assert set(record["timings"]) == set(known)
    assert not record["left_out"]
    sent = {name: timed["wire_bytes_most"] / NBYTES for name, timed in record["timings"].items()}
    for name, timed in record["timings"].items():
        assert len(timed["times_s"]) >= known[name].least
        assert 0 < timed["min_s"] <= timed["median_s"] <= timed["p99_s"]
        assert (sent[name] < 0.2) == name.startswith(("one-bit", "Marsit")), name
    assert "| 3 | none | 400kB" in output
    # MPI's algorithm is switched within the job: each sends what is its own among three
    for name in ("MPI ring", "MPI segmented ring", "MPI segmented ring, 1 MiB", "dense ring", "Gloo"):
        assert sent[name] == pytest.approx(4 / 3, rel=0.1), name
    assert sent["MPI recursive doubling"] == pytest.approx(2, rel=0.1)  # the third rank's part goes through another
    assert "none: 400kB" in output
    again, output = compare(tmp_path, "--nodes", "3", "--rates", "none")
    assert again == record
    assert "none: 400kB" not in output


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of this process run on a busy machine too, where a link may carry less, and end in time."""
    monkeypatch.setattr(Measured, "true", True)
    monkeypatch.setattr("apps.performance.cluster.driver.LONGEST_JOB_S", LIMIT_S)


def test_a_long_vectors_cell_is_predicted_from_what_its_job_measured(tmp_path: Path) -> None:
    cell = Cell(Cluster(2, "100mbit"), predicted.LEAST_BYTES)
    measure_cells(cell.cluster, [cell], tmp_path, Limits(budget_s=1.0), mpich=False)
    record = json.loads((tmp_path / f"{cell.name}.json").read_text())
    assert len(record["advised"]) == len(record["environment"]["memory_scaling"]) == 1
    for name in predicted.PREDICTED.keys() & record["timings"]:
        assert predicted.predict(record, name) > 0
    wire_s = 8 * cell.nbytes / 100e6
    assert 0.5 * wire_s < predicted.predict(record, "dense ring") < 5 * wire_s


def test_overlap_is_measured(tmp_path: Path) -> None:
    n = 4_000_000
    record = measure_alone("overlap", Cluster(2, "100mbit"), tmp_path / "record.json", n=n, repeats=5)
    assert record["wire_s"] > 8 * (n / 8 - 80_000) / 100e6  # n / 8 bytes, less what the token bucket holds
    assert record["compute_s"] > 0
    assert record["both_s"] < 5 * (record["wire_s"] + record["compute_s"])
    assert record["bytes_sent"] == pytest.approx(n / 8, rel=0.01)


def test_every_method_is_timed_beside_its_bytes_and_its_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, n = Cluster(2, "100mbit"), 100_000
    monkeypatch.setattr(methods, "REPEATS", {cluster: 2})
    monkeypatch.setattr(methods, "N", n)
    assert measure_missing(methods.MEASUREMENT, tmp_path, fresh=False) == []
    record = json.loads((tmp_path / "methods" / f"methods-{cluster.name}.json").read_text())
    assert list(record["rows"]) == list(methods.METHODS)
    for name, row in record["rows"].items():
        assert min(row["codec_s"]) > 0, name
        stages = (row["cost"][f"seconds_{stage}"] for stage in ("encoding", "merging", "decoding", "waiting"))
        total_s, rounding = row["cost"]["seconds_total"], 1 + 1e-9
        assert 0 <= sum(stages) <= total_s * rounding, name
        assert total_s <= row["elapsed_s"] * rounding, name
        assert row["predicted_s"] > 0, name
    sent = {name: row["cost"]["bytes_sent"] for name, row in record["rows"].items()}
    assert sent["dense"] == pytest.approx(4 * n, rel=0.01)
    assert sent["Marsit"] == pytest.approx(n / 8, rel=0.02)
    assert all(f"\n| {name} | " in methods.render([record]) for name in methods.METHODS)
