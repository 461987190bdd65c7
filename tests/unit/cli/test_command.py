"""Progress of commands: a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from mpicomp.cli import command
from mpicomp.cli.command import Steps


def work(active: bool = True) -> None:
    with Steps("mpicomp toil", 2, active) as steps:
        steps.begin("digging")
        steps.begin("filling in")


def test_without_a_terminal_each_step_is_a_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "mpicomp toil: step 1 of 2, after 0 s: digging",
        "mpicomp toil: step 2 of 2, after 0 s: filling in",
    ]


def test_the_time_to_go_is_that_of_the_steps_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.0, 3.0, 8.0, 12.0])
    monkeypatch.setattr(command.time, "perf_counter", lambda: next(now))
    with Steps("mpicomp toil", 4, True) as steps:
        steps.announce("4 holes of 1 to 5 s each")
        for hole in range(4):
            steps.begin(f"hole {hole}")
        steps.print("a row")
    out, err = capsys.readouterr()
    assert out == "a row\n"
    assert err.splitlines() == [
        "mpicomp toil: 4 holes of 1 to 5 s each",
        "mpicomp toil: step 1 of 4, after 0 s: hole 0",
        "mpicomp toil: step 2 of 4, after 3 s: hole 1",
        "mpicomp toil: step 3 of 4, after 8 s, about 8 s to go: hole 2",
        "mpicomp toil: step 4 of 4, after 12 s, about 4 s to go: hole 3",
    ]


def test_on_a_terminal_a_bar_moves_and_vanishes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(command, "on_terminal", lambda: True)
    work()
    out, err = capsys.readouterr()
    assert not err
    assert "1/2" in out
    assert "filling in" in out
    assert out.rstrip("\n").endswith("\x1b[2K")  # the line is empty again


def test_without_rich_there_are_lines_on_a_terminal_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without_rich(name: str, *arguments: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(command, "on_terminal", lambda: True)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    work()
    assert capsys.readouterr().err.count("\n") == 2


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work(active=False)
    assert capsys.readouterr() == ("", "")


def test_a_pseudo_terminal_whose_launcher_writes_to_a_file_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for output, seen in (("/dev/pts/1", True), ("/tmp/log", False), ("pipe:[1]", False)):
        monkeypatch.setattr(command.Path, "readlink", lambda self, output=output: output)
        assert command.on_terminal() is seen
