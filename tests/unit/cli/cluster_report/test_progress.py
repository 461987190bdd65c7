"""Progress of `mpicomp bench --report`: at once, with each new work, and in between."""

from __future__ import annotations

import time

import pytest

from mpicomp.cli.cluster_report import progress
from mpicomp.cli.cluster_report.progress import Progress


def test_a_line_has_ranks_measurements_and_the_time_to_go() -> None:
    one = Progress("4 ranks", 300, active=False)
    assert one.line(0) == "4 ranks, at most 300 s to go: starting"
    one.n_measurements, one.n_done = 24, 3.5
    one.begin("all-reduce of 16 MB")
    assert one.line(10.5) == "4 ranks, 3 of 24 measurements, about 62 s to go: all-reduce of 16 MB"
    assert one.line(280) == "4 ranks, 3 of 24 measurements, at most 20 s to go: all-reduce of 16 MB"
    assert one.line(400) == "4 ranks, 3 of 24 measurements, at most 0 s to go: all-reduce of 16 MB"


def test_lines_are_printed_at_once_and_while_a_call_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress.EVERY_S <= 5
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    with Progress("4 ranks", 300, active=True):
        assert capsys.readouterr().err.startswith("4 ranks, at most 300 s to go: starting\n")
        end = time.monotonic() + 30
        while not capsys.readouterr().err and time.monotonic() < end:
            time.sleep(0.01)
        assert time.monotonic() < end
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("4 ranks", 300, active=False) as one:
        one.begin("links")
    assert capsys.readouterr().err == ""
