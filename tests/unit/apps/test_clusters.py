"""The page of results of other clusters is made of the reports in ``docs/records/clusters``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apps.clusters import FOLDER, PAGE, table
from mpicomp.cli.cluster_report.validation import problems
from tests.cluster_reports import sample


def test_the_page_has_the_table_of_its_reports() -> None:
    assert f"<!-- begin clusters -->\n{table()}\n<!-- end clusters -->" in PAGE.read_text()


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_every_report_is_valid(path: Path) -> None:
    assert path.suffix == ".json"
    assert problems(json.loads(path.read_text())) == []


def test_a_report_has_a_row_for_each_size_that_was_measured(tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text(json.dumps(sample()))
    report = sample()
    report["allreduce"][0]["calls"].append(report["allreduce"][0]["calls"][2] | {"name": "relay"})
    report["training"] |= {"skipped": "no torch", "steps": []}
    (tmp_path / "ours.json").write_text(json.dumps(report))
    _, _, ours, theirs = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table(tmp_path).splitlines())
    assert (ours[0], ours[-1], theirs[0], theirs[-1]) == ("ours", "PyTorch is not installed", "theirs", "2.00")
    assert ours[5:9] == ["1 MB", "20.0 (MPI ring)", "20.00", "20.00"]
    assert theirs[8] == "–"


def test_a_report_that_is_not_valid_is_named(tmp_path: Path) -> None:
    (tmp_path / "ours.json").write_text(json.dumps(sample() | {"host": "node17"}))
    with pytest.raises(ValueError, match=r"ours.json: host: no field of a report"):
        table(tmp_path)
