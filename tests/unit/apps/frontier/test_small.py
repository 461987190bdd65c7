"""Small trainings: what the record has is not trained again, and the page's table is the record's."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.frontier import __main__ as command
from apps.frontier import price, small
from apps.records import read_record
from apps.reproduce.marsit.fixed_rates import DENSE, FixedRate
from apps.studies.results import Results

ONE = FixedRate("digits", 4, "momentum", 0.05, DENSE)
ACCURACIES = {DENSE: 0.9, "K = 1": 0.9, "Relay, updates": 0.89, "Relay, gradients": 0.91}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The runs of one training that a stand-in makes, in a record of its own."""
    made: list[tuple[str, int]] = []

    def run(results: Results, training: FixedRate, seed: int, deadline: float) -> dict[str, object]:
        made.append((training.method, seed))
        return {"settings": training.settings(seed), "accuracy": ACCURACIES[training.method]}

    monkeypatch.setattr(small, "TRAININGS", [ONE])
    monkeypatch.setattr(small, "RECORD", tmp_path / "small.json")
    monkeypatch.setattr(small, "run", run)
    monkeypatch.setattr(small, "run_parallel", lambda runs: {case: run() for case, run in runs.items()})
    monkeypatch.setattr(price, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("<!-- begin small -->\n<!-- end small -->\n")
    return made


def test_only_runs_that_the_record_lacks_are_made(made: list[tuple[str, int]], tmp_path: Path) -> None:
    arguments = ["small", "--folder", str(tmp_path / "runs"), "--publish"]
    assert command.main([*arguments, "--seeds", "2"]) == 0
    assert len(made) == 2 * len(ACCURACIES)
    assert command.main([*arguments, "--seeds", "3"]) == 0
    assert sorted(made[2 * len(ACCURACIES) :]) == sorted((method, 2) for method in ACCURACIES)
    assert (
        "| digits, 4 ranks, momentum 0.05 | 3 | 90.00 | −1.00 | +1.00 | +0.00 |" in (tmp_path / "page.md").read_text()
    )


def test_the_page_has_the_table_of_the_record() -> None:
    assert f"<!-- begin small -->\n{small.table(read_record(small.RECORD))}\n<!-- end" in price.PAGE.read_text()
