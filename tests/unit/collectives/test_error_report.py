"""Reports of errors to the launcher, before the first communicator and after it."""

from __future__ import annotations

import sys

import pytest

from collectives import CollectiveTimeout, error_report
from collectives.error_report import VARIABLE, parse


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the hook of a rank of a job whose launcher reads reports."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(error_report, "place_in_job", lambda environment: (1, 3))
    monkeypatch.setattr(error_report, "parent", lambda: None)
    monkeypatch.setattr(error_report, "_is_wrapped", False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error_report.report_early()


@pytest.mark.parametrize(("error", "follows"), [(KeyError("x"), False), (CollectiveTimeout("rank 0 is late"), True)])
@pytest.mark.usefixtures("early")
def test_an_early_error_of_another_rank_is_not_the_cause(
    error: Exception, follows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.excepthook(type(error), error, None)
    report = parse(capsys.readouterr().err)
    assert report is not None
    assert (report.rank, report.size, report.follows) == (1, 3, follows)


@pytest.mark.usefixtures("early")
def test_the_hook_prints_a_plain_traceback_once_another_one_reports(capsys: pytest.CaptureFixture[str]) -> None:
    previous = error_report.other_hook()
    previous(KeyError, KeyError("x"), None)
    assert capsys.readouterr().err == "KeyError: 'x'\n"


@pytest.mark.usefixtures("early")
def test_a_hook_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*arguments: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", own)
    error_report.report_early()
    assert sys.excepthook is own
