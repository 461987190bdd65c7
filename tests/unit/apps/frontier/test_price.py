"""The price of compression: one command trains, compares seed by seed, and writes record and table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apps.frontier import __main__ as command
from apps.frontier import price
from apps.frontier.price import DENSE, Case
from apps.records import Record

LOSSES = {DENSE: 1.5, "Relay(4)": 1.52}


def stand_in(case: Case, seed: int, steps: int) -> Record:
    """A run of which only the method and the seed matter."""
    loss = LOSSES[case.method] + 0.1 * seed + (0.01 * seed if case.method != DENSE else 0)
    return {"losses": [9.0, loss], "bytes": 1500.0 if case.method == DENSE else 100.0, "elements": 10}


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cases of one method without trainings, and a page of their own."""
    monkeypatch.setattr(price, "CASES", (Case("Relay(4)", 10), Case("Relay(4)", 0)))
    monkeypatch.setattr(price, "run", stand_in)
    monkeypatch.setattr(price, "run_seeds", _in_turn)
    page = tmp_path / "page.md"
    page.write_text("<!-- begin price -->\n<!-- end price -->\n")
    monkeypatch.setattr(price, "PAGE", page)
    monkeypatch.setattr(command, "RECORDS", tmp_path / "records")
    return tmp_path


def _in_turn(cases: Any, seeds: int, make: Any) -> dict[Case, list[Record]]:
    return {case: [make(case, seed)() for seed in range(seeds)] for case in cases}


def _must_not_run(*case: Any) -> Record:
    raise AssertionError(case)


def test_prices_are_differences_of_runs_of_one_seed(few: Path) -> None:
    assert command.main(["price", "--seeds", "2", "--folder", str(few / "runs"), "--publish"]) == 0
    record = json.loads((few / "records" / "price.json").read_text())
    (local, gradients) = record["rows"]
    assert local["losses"] == pytest.approx([1.52, 1.63])
    assert local["exact"] == pytest.approx([1.5, 1.6])
    assert local["price"] == pytest.approx(0.025)
    assert gradients["local_steps"] == 0
    page = (few / "page.md").read_text()
    assert "| Relay(4) | 15.0 | +0.025 (+0.020 to +0.030) |" in page
    assert "| Relay(4), gradients of every step, 4 ranks | 15.0 | +0.025 (+0.020 to +0.030) |" in page


def test_runs_that_are_there_are_not_made_again(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["price", "--seeds", "2", "--folder", str(few / "runs")]
    assert command.main(arguments) == 0
    monkeypatch.setattr(price, "run", _must_not_run)
    assert command.main(arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--seeds", "1"], "an interval needs 2 or more"), (["--quick", "--publish"], "not those of the record")],
)
def test_arguments_without_a_record_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["price", *arguments])
    assert words in capsys.readouterr().err


def test_a_training_by_relay_ends_near_the_exact_mean() -> None:
    exact, ours = (price.run(Case(method, 10, 2), 0, 120) for method in (DENSE, "Relay(4)"))
    assert ours["losses"][-1] < exact["losses"][-1] + 0.05
    assert exact["bytes"] > 12 * ours["bytes"]
