"""The benchmark of pipelines side by side: timed and sent data, link rates, and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apps.appendices import replace_block
from apps.environment import environment
from apps.performance.cluster import driver, pipeline_grid, pipeline_grid_tables
from apps.performance.cluster.__main__ import DOCUMENT
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.measurements import MEASUREMENTS
from apps.performance.cluster.pipeline import DELTAS, DIRECT, FP32, SLOW
from apps.performance.cluster.pipeline_grid import ADAM, DENSE, SENT, WAYS
from apps.performance.cluster.tables import NOTHING
from apps.records import Record, write_record
from collectives.threads.run_local import run_local
from mpicomp.pipeline.messages import HEADER_BYTES

SMALL = {"context": 4, "width": 64, "blocks": 1, "examples": 2, "micro_batches": 2, "batches": 2}


def links(rate: str, bits_per_s: float) -> dict[str, Any]:
    settings = {"nodes": 4, "rate": rate, "between": "none"}
    return {"links": [{"bits_per_s": bits_per_s}], "settings": settings}


def made(rate: str, bits_per_s: float, seconds: dict[tuple[str, str], list[float]]) -> Record:
    """A record of steps that all take 4 s, except for those named."""
    rows = [
        {"activations": way[0], "gradients": way[1], "times_s": seconds.get(way, [4.0] * 3),
         "sent_bytes": dict.fromkeys(SENT, 2_500_000.0)}
        for way in WAYS
    ]  # fmt: skip
    told = {"part": "pipeline-grid", "load": SMALL, "batch": 128, "parameters": 1000, "environment": environment()}
    return links(rate, bits_per_s) | told | {"rows": rows}


@pytest.fixture(scope="module")
def measured() -> Record:
    """Return the measurements of rank 0 of a grid of threads."""
    return run_local(4, lambda comm: pipeline_grid.measure_here(comm, 1, **SMALL))[0]


def test_every_compression_of_activations_is_timed_with_both_kinds_of_gradients(measured: Record) -> None:
    found = [(row["activations"], row["gradients"]) for row in measured["rows"]]
    assert found == [(one, other) for one in (FP32, "DirectQ fw3 bw6", "AQ-SGD fw3 bw6") for other in (DENSE, ADAM)]
    assert all(len(row["times_s"]) == 1 and row["median_s"] > 0 for row in measured["rows"])
    assert measured["batch"] == 2 * 2 * 2
    text = pipeline_grid_tables.render([measured | links("1gbit", 1e9)])
    assert replace_block(DOCUMENT.read_text(), "cluster-pipeline-grid", text).count(text) == 1


def test_timed_steps_send_few_bits_of_what_is_compressed_and_float32_of_all_else(measured: Record) -> None:
    sent = {(row["activations"], row["gradients"]): list(row["sent_bytes"].values()) for row in measured["rows"]}
    rows, columns, headers = 4 * 4, 64, 2 * HEADER_BYTES  # of a batch
    for (activations, gradients), (forward, backward, of_model) in sent.items():
        full, scales = activations == FP32, 2 * rows
        assert forward == headers + (4 * rows * columns if full else 3 * rows * columns // 8 + scales)
        assert backward == headers + (4 * rows * columns if full else 6 * rows * columns // 8 + scales)
        assert of_model == sent[FP32, gradients][2]
    assert measured["parameters"] / 2 < sent[FP32, DENSE][2] / 4 < measured["parameters"] * 0.55
    assert sent[FP32, DENSE][2] / sent[FP32, ADAM][2] == pytest.approx(8, rel=0.1)


def test_a_load_draws_examples_of_its_own_for_each_replica() -> None:
    from apps.performance.pipeline_load import Load

    (inputs, _), (others, _) = (Load(**SMALL).texts(seed) for seed in (0, 1))
    assert (inputs != others).any()


def test_the_slow_rate_is_that_of_the_pipelines_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, Cluster, str]] = []

    def measure_alone(part: str, cluster: Cluster, path: Path, *_: Any, **__: Any) -> None:
        jobs.append((part, cluster, path.name))

    monkeypatch.setattr(driver, "measure_alone", measure_alone)
    measurement = MEASUREMENTS["pipeline-grid"]
    assert "the slow rate is not known" in driver.measure_missing(measurement, tmp_path, fresh=False)[0]
    assert [cluster.rate for _, cluster, _ in jobs] == ["1gbit", "100mbit"]
    jobs.clear()
    write_record(tmp_path / "pipeline" / f"{SLOW}.json", links("13.3mbit", 12.7e6))
    assert driver.measure_missing(measurement, tmp_path, fresh=False) == []
    assert jobs[2:] == [("pipeline-grid", Cluster(4, "13.3mbit"), "pipeline-grid-slow.json")]


def test_a_record_that_is_there_is_measured_again_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[str] = []
    monkeypatch.setattr(driver, "measure_alone", lambda part, cluster, path, *_, **__: jobs.append(path.name))
    measurement = MEASUREMENTS["pipeline-grid"]
    write_record(tmp_path / "pipeline" / f"{SLOW}.json", links("13.3mbit", 12.7e6))
    write_record(tmp_path / "pipeline-grid" / "pipeline-grid-4x1gbit.json", links("1gbit", 1e9))
    driver.measure_missing(measurement, tmp_path, fresh=False)
    assert jobs == ["pipeline-grid-4x100mbit.json", "pipeline-grid-slow.json"]
    jobs.clear()
    driver.measure_missing(measurement, tmp_path, fresh=True)
    assert jobs[0] == "pipeline-grid-4x1gbit.json"


def test_tables_tell_the_speed_up_over_no_compression_and_over_either_alone() -> None:
    assert pipeline_grid_tables.render([]) == NOTHING
    both, direct = (DELTAS[1], ADAM), (DIRECT[1], ADAM)
    seconds = {both: [0.5, 0.5, 1.0], direct: [1.0, 0.5, 1.0], (FP32, ADAM): [2.0] * 3}
    text = pipeline_grid_tables.render([made("13.3mbit", 12.7e6, seconds), made("1gbit", 1e9, {})])
    assert "| activations as | gradients as | 1gbit | 13.3mbit |" in text
    assert "| AQ-SGD fw3 bw6 | 4-bit Adam | 32 (1.00×) | 256 (8.00×) |" in text
    assert "| fp32 | 4-bit Adam | 32 (1.00×) | 64 (2.00×) |" in text
    assert "| neither compressed | 1.00 | 8.00 |" in text
    assert "| activations alone | 1.00 | 8.00 |" in text
    assert "| the model's gradients alone | 1.00 | 4.00 |" in text
    assert "| DirectQ fw3 bw6 and 4-bit Adam | 1.00 | 1.00 |" in text  # the median of rounds, not of medians
    assert "| fp32 | dense | 2.500 | 2.500 | 2.500 |" in text
