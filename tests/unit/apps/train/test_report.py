"""JSON lines survive a resume and stay JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from apps.train.report import Report

EPOCH: dict[str, Any] = {
    "loss": 0.5,
    "accuracy": 0.9,
    "bytes_so_far_per_rank": 1e6,
    "seconds_so_far": 2.0,
    "seconds_communicating_so_far": 1.0,
}


def write_epochs(path: Path, epochs: range, completed: int, **changes: Any) -> None:
    with Report(True, path, {"algorithm": "dense"}, completed) as report:
        report.begin("dense", 10, completed)
        for epoch in epochs:
            report.epoch({"epoch": epoch, **EPOCH, **changes}, 5)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_stands_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    write_epochs(path, range(1, 3), 0)
    assert [(r["kind"], r["epoch"], r["algorithm"]) for r in records(path)] == [
        ("epoch", 1, "dense"),
        ("epoch", 2, "dense"),
    ]


def test_a_resume_keeps_the_epochs_it_does_not_repeat(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_epochs(path, range(1, 4), 0)
    with path.open("a") as file:
        file.write("[]\n" + '{"kind": "epoch"}\n' + '{"epoch": 1}\n' + "[" * 100_000 + "\n")  # not ours
        file.write('{"kind": "epo')  # the run was killed here
    write_epochs(path, range(3, 5), 2, loss=0.1)
    assert [(r["epoch"], r["loss"]) for r in records(path)] == [(1, 0.5), (2, 0.5), (3, 0.1), (4, 0.1)]


def test_a_fresh_run_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_epochs(path, range(1, 4), 0)
    write_epochs(path, range(1, 2), 0)
    assert len(records(path)) == 1


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_epochs(path, range(1, 2), 0, loss=math.nan)
    assert records(path)[0]["loss"] is None


def test_other_ranks_are_silent(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.json"
    with Report(False, path, {}, 0) as report:
        report.begin("dense", 10, 0)
        report.epoch({"epoch": 1, **EPOCH}, 5)
        report.print_line("hello")
    assert not path.exists()
    assert capsys.readouterr().out == ""
