"""Commands whose output nobody reads, or that Ctrl-C ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpicomp.cli.outcome import status_of
from tests.documents import PROJECT

COMMAND = [sys.executable, "-m", "mpicomp", "run", "--dry-run", "-n", "2", "true"]


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_closed_pipe_ends_a_command_without_a_traceback(buffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environ = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": buffered}
    done = subprocess.run(COMMAND, env=environ, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_runs_where_the_shell_has_closed_an_output(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, stream, None)
    assert status_of("help", lambda: getattr(sys, stream).write("page")) == len("page")
    getattr(sys, stream).close()


def test_ctrl_c_ends_a_command_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert status_of("bench", interrupted) == 130
    assert capsys.readouterr().err == "mpicomp bench: stopped\n"
