"""Commands with an output of ASCII, without a home, with one that cannot be written, and in a read-only folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomp.cli.main import COMMANDS
from tests.documents import PROJECT

SURROUNDINGS = {
    "ASCII, no home": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "HOME": None},
    "no folder at home": {"HOME": "/proc/none"},
}
# Arguments with which a command is over soon, its exit status, and a part of its last lines.
RUNS = {
    "demo": (
        ["--steps", "1", "--ranks", "2", "--link", "none", "--output", "{folder}/demo.svg"],
        0,
        "mpicomp help pytorch",
    ),
    "run": (["--dry-run", "-n", "2", sys.executable, "-c", ""], 0, "OMP_NUM_THREADS"),
    "doctor": ([], 0, "arrays on GPUs"),
    "warm": (["--help"], 0, "usage: mpicomp warm"),
    "bench": (["--count", "1000", "--repeats", "2", "--warmup", "1"], 0, "ok"),
    "report": (["check", "{folder}/none.json"], 2, "name a report"),
    "advise": (["--count", "1000"], 2, "one rank sends and merges nothing"),
    "trace": (["{folder}"], 2, "no rank has left a trace"),
    "analyze": (["{folder}"], 2, "no rank"),
    "help": (["faults"], 0, "# Ranks that die"),
    "completion": (["bash"], 0, "complete"),
}
# One process imports PyTorch once for all programs of a checkout.
APPS = """
import runpy, sys
for app in ("train", "finetune", "reproduce", "scale"):
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module(f"apps.{app}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, app
    else:
        raise AssertionError(app)
"""


def outcome(arguments: list[str], changes: dict[str, str | None], cwd: str) -> tuple[int, str]:
    """Run Python with `arguments` in changed surroundings; return its exit status and its output."""
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    for name, value in changes.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=environ, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_every_command_runs_in_these_surroundings() -> None:
    assert RUNS.keys() == COMMANDS.keys()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("command", RUNS)
def test_a_command_ends_with_its_report(command: str, surroundings: str, tmp_path: Path) -> None:
    if command == "completion":
        pytest.importorskip("shtab")
    arguments, status, text = RUNS[command]
    given = [one.format(folder=tmp_path) for one in arguments]
    found, output = outcome(
        ["-m", "mpicomp", command, *given], SURROUNDINGS[surroundings], "/proc"
    )  # which is read-only
    assert (found, text in output) == (status, True), output


@pytest.mark.timeout(180)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_programs_of_a_checkout_begin(surroundings: str) -> None:
    pytest.importorskip("torch")
    found, output = outcome(["-c", APPS], SURROUNDINGS[surroundings], "/proc")
    assert found == 0, output
    assert output.count("usage: ") == 4, output


def test_the_doctor_reports_a_missing_home_and_ends_its_list(tmp_path: Path) -> None:
    found, output = outcome(["-m", "mpicomp", "doctor"], {"HOME": None}, str(tmp_path))
    assert found == 0, output
    assert "HOME is not set, without which Open MPI does not start" in output
    assert "arrays on GPUs" in output, output
