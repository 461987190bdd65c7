"""Commands whose output nobody reads, or that Ctrl-C ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomp.cli.outcome import run_command
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


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_and_its_children_run_where_the_shell_has_closed_an_output(closed: str, tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "from mpicomp.cli.outcome import open_closed_outputs, run_command\n"
        "open_closed_outputs()\n"
        "child = [sys.executable, '-c', 'import sys; print(); print(file=sys.stderr)']\n"
        "status = run_command('help', lambda: print('page') or subprocess.run(child).returncode)\n"
        "open(sys.argv[1], 'w').write(str(status))\n"
    )
    path = tmp_path / "status"
    shell = f'"$0" -c "$1" "$2" {closed}'
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    subprocess.run(
        ["bash", "-c", shell, sys.executable, program, str(path)],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=True,
    )
    assert path.read_text() == "0"


def test_a_closed_pipe_ends_the_help_of_a_command_without_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mpicomp", "run", "--help"]
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, env=environ, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert not done.stderr


def test_ctrl_c_ends_a_command_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_command("bench", interrupted) == 130
    assert capsys.readouterr().err == "mpicomp bench: stopped\n"
