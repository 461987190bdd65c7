"""The Makefile with a stand-in for Python: the source of PyTorch, repeated set-ups, and parts of ``make test``."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.documents import PROJECT

INDEX = "https://download.pytorch.org/whl/cpu"
STAND_IN = """#!/bin/sh
case "$*" in
    *"pip show"*) exit {absent} ;;
    *--index-url*) echo "own index: $*"; exit {refused} ;;
    *"pip install"*) echo "usual index: $*" ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the files that ``make setup`` reads."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((PROJECT / name).read_bytes())
    return tmp_path


def set_up(folder: Path, *arguments: str, absent: int = 1, refused: int = 0) -> tuple[list[str], str]:
    """Run ``make setup``; where packages were taken from, and all that was printed."""
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(STAND_IN.format(absent=absent, refused=refused))
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "-C", str(folder), "setup", *arguments], env=os.environ | {"MAKEFLAGS": ""},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.partition(":")[0] for line in done.stdout.splitlines() if " index: " in line], done.stdout


def test_pytorch_comes_first_and_from_its_own_index(project: Path) -> None:
    indices, printed = set_up(project)
    assert indices == ["own index", "usual index"]
    assert f"--constraint constraints.txt --index-url {INDEX} torch" in printed


def test_where_that_index_cannot_be_reached_pip_takes_its_own(project: Path) -> None:
    indices, printed = set_up(project, refused=1)
    assert indices == ["own index", "usual index"]
    assert f"{INDEX} gives no PyTorch: pip takes it from its own index" in printed


@pytest.mark.parametrize("target", [".venv/.ready", ".venv-site/.ready", ".venv-core/.ready", ".venv/.ready-examples"])
def test_a_long_installation_shows_that_it_works(project: Path, target: str) -> None:
    python = (project / target).parent / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *"pip install"*) sleep 1 ;; *"pip show"*) exit 0 ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "-C", str(project), target, "LIFE_S=0.2"], env=os.environ | {"MAKEFLAGS": ""},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"^\.venv[a-z-]*: pip has worked for \d s, \S+ so far$", done.stderr, re.MULTILINE)


def test_a_pytorch_that_is_there_stays(project: Path) -> None:
    assert set_up(project, absent=0)[0] == ["usual index"]


def test_the_index_can_be_left_out(project: Path) -> None:
    assert set_up(project, "TORCH_INDEX=")[0] == ["usual index"]


def test_what_is_complete_is_not_installed_again(project: Path) -> None:
    set_up(project)
    assert set_up(project)[0] == []


@pytest.mark.parametrize("target", ["test", "test-all"])
@pytest.mark.parametrize("failing", ["pytest", "run_lanes", "neither"])
def test_all_parts_of_the_tests_run_and_the_worst_status_counts(failing: str, target: str, project: Path) -> None:
    programs = {".venv/bin/python": f'echo "ran $*"; case "$*" in *{failing}*) exit 1 ;; esac', ".venv/bin/mpirun": ""}
    for path, text in (programs | {"slurm/env.sh": 'PATH="$PWD/.venv/bin:$PATH"', ".venv/.ready": ""}).items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(f"#!/bin/sh\n{text}\n")
        (project / path).chmod(0o755)
    done = subprocess.run(
        ["make", "-C", str(project), target], env=os.environ | {"MAKEFLAGS": ""},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ran -m pytest tests/unit" in done.stdout, done.stderr
    assert "ran tests/run_lanes.py" in done.stdout, done.stderr
    assert (done.returncode == 0) == (failing == "neither")
    is_short = target == "test"
    assert (" --first-cases tests/unit/kernels/gpu --ignore tests/unit/apps " in done.stdout) == is_short
    assert (" --ranks 3,8,2\n" in done.stdout) == is_short


def test_what_the_short_run_leaves_out_exists() -> None:
    text = (PROJECT / "Makefile").read_text()
    (names,) = re.findall(r"^WHOLE_JOBS := ((?:.*\\\n)*.*)", text, re.MULTILINE)
    paths = [PROJECT / "tests" / "unit" / name for name in names.replace("\\", "").split()]
    assert len(paths) > 3
    assert [path for path in paths if not path.exists()] == []
