"""JSON lines survive a resume and stay JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apps.train.report import Report

EPOCH: dict[str, Any] = {
    "loss": 0.5,
    "accuracy": 0.9,
    "bytes_so_far_per_rank": 1e6,
    "seconds_so_far": 2.0,
    "seconds_communicating_so_far": 1.0,
}


def ranks(rank: int) -> Any:
    """Return a stand-in for a communicator, whose rank may change."""
    return SimpleNamespace(rank=rank, size=4, recovery=None)


def write_epochs(path: Path, epochs: range, completed: int, **changes: Any) -> None:
    with Report(ranks(0), path, lambda: {"algorithm": "dense"}, completed) as report:
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
    with Report(ranks(1), path, dict, 0) as report:
        report.begin("dense", 10, 0)
        report.epoch({"epoch": 1, **EPOCH}, 5)
        report.print_line("hello")
    assert not path.exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("left", ["", '{"kind": "epoch", "epoch": 2, "loss": 0.5}\n', '{"kind": "epo'])
def test_a_new_rank_0_goes_on_with_the_record_and_repeats_no_line(tmp_path: Path, capsys: Any, left: str) -> None:
    path, comm = tmp_path / "run.json", ranks(1)
    write_epochs(path, range(1, 2), 0)
    with path.open("a") as file:
        file.write(left)  # by the former rank 0, which has died while the ranks recorded the second epoch
    with Report(comm, path, lambda: {"algorithm": "dense"}, 0) as report:
        report.begin("dense", 10, 0)
        report.epoch({"epoch": 1, **EPOCH}, 5)
        report.epoch({"epoch": 2, **EPOCH}, 5)
        assert path.read_text().endswith(left)
        comm.rank = 0
        report.epoch({"epoch": 2, **EPOCH}, 5)
        report.epoch({"epoch": 3, **EPOCH}, 5)
    assert [(one["kind"], one["epoch"]) for one in records(path)] == [("epoch", 1), ("epoch", 2), ("epoch", 3)]
    assert "epoch   2/5" in capsys.readouterr().out


def test_a_run_shows_at_once_that_it_has_begun_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Report(ranks(0), None, dict, 0) as report:
        report.begin("dense", 300, 0)
        report.advance(300, 1)
        assert capsys.readouterr().out == "4 ranks, step 0 of 300\n"
        monkeypatch.setattr("apps.train.report.QUIET_S", 0.0)
        report.advance(300, 2)
        assert capsys.readouterr().out == "step 2 of 300\n"
