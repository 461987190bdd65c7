"""`mpicomp report check`: a line for each problem, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpicomp.cli.main import main
from tests.cluster_reports import sample


def test_a_valid_report_takes_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(sample()))
    assert main(["report", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path} is a valid report\n"


def test_a_line_for_each_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(sample() | {"user": "ada", "host": "node17"}))
    assert main(["report", "check", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["host", "user"]


@pytest.mark.parametrize("content", ["", "{", "[" * 5000, '{"schema": 1, "schema": 1}'])
def test_a_file_that_is_not_json_is_a_problem_with_a_cure(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    assert main(["report", "check", str(path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path} is not JSON")
    assert line.endswith("measure again with mpicomp bench --report")


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "check", str(tmp_path / "none.json")]) == 2
    error = capsys.readouterr().err
    assert error == f"mpicomp report: error: {tmp_path}/none.json: No such file or directory; name a report\n"


def test_another_action_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "send", "file"])
    assert "check" in capsys.readouterr().err
