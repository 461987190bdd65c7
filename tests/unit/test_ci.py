"""``.ci/run`` with stand-ins for make and for parts that a machine may lack: it reports skipped tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"
TOOLS = ("bash", "cat", "chmod", "cut", "dirname", "env", "grep", "mktemp", "rm", "setsid", "tail", "tee")
SLURM = ("munged", "slurmctld", "slurmd", "sbatch")
PROGRAMS = dict.fromkeys((*SLURM, "ip", "tc", "unshare"), "") | {"make": 'echo "made $1"', "apt-get": "exit 1"}
PMIX = "usr/lib/x/pmix2/lib/libpmix.so"


def check(
    folder: Path, uid: int = 0, without: tuple[str, ...] = (), status: int = 0, **programs: str
) -> tuple[str, str]:
    """Run the script in a folder that also stands for the system's; return its output and its warnings."""
    programs = {name: text for name, text in (PROGRAMS | programs).items() if name not in without}
    for path in (".ci", ".venv/bin", "bin", "usr/sbin", str(Path(PMIX).parent)):
        (folder / path).mkdir(parents=True)
    stand_ins = {f"bin/{name}": text for name, text in programs.items()}
    for path, text in {**stand_ins, "bin/id": f"echo {uid}", ".venv/bin/python": ""}.items():
        (folder / path).write_text(f"#!/bin/sh\n{text}\n")
        (folder / path).chmod(0o755)
    for name in TOOLS:
        (folder / "bin" / name).symlink_to(shutil.which(name) or name)
    if PMIX not in without:
        (folder / PMIX).touch()
    (folder / ".ci" / "run").write_text(SCRIPT.read_text().replace("/usr/", f"{folder}/usr/"))
    done = subprocess.run(
        [folder / "bin" / "bash", ".ci/run"], cwd=folder, env=os.environ | {"PATH": str(folder / "bin")},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_a_machine_that_has_all_skips_nothing(tmp_path: Path) -> None:
    made, warned = check(tmp_path)
    tests = ("test-all", "test-mpich", "test-core", "test-integrations", "test-slurm", "test-cluster")
    for target in ("lint", "site", *tests):
        assert f"made {target}\n" in made
    assert not warned


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ({"uid": 1000}, "it needs root"),
        ({"without": ("ip",)}, "iproute2 could not be installed"),
        ({"without": ("tc",)}, "iproute2 could not be installed"),
        (
            {"unshare": "echo Operation not permitted >&2; exit 1"},
            "the kernel refuses network namespaces or what belongs into them: Operation not permitted",
        ),
    ],
)
def test_where_hosts_cannot_be_emulated_a_warning_gives_the_reason(
    lacking: dict[str, object], reason: str, tmp_path: Path
) -> None:
    made, warned = check(tmp_path, **lacking)
    assert "made test-cluster" not in made
    assert f"!!! make test-cluster is SKIPPED: {reason}\n" in warned


def test_without_pmix_a_warning_names_the_skipped_test(tmp_path: Path) -> None:
    made, warned = check(tmp_path, without=(PMIX,))
    assert "made test-slurm" in made
    assert warned == "!!! the test of srun as a launcher will be SKIPPED: libpmix-dev could not be installed\n"


def test_without_slurm_a_warning_names_its_tests(tmp_path: Path) -> None:
    _, warned = check(tmp_path, without=("slurmd",))
    assert warned == "!!! tests under Slurm will be SKIPPED: Slurm could not be installed\n"


def test_the_end_of_the_log_names_failed_tests(tmp_path: Path) -> None:
    lint, test = "echo E501; exit 1", 'echo "FAILED tests/a.py::test_b - why"; echo much more; exit 2'
    make = f"case $1 in lint) {lint};; test-all) {test};; esac"
    made, _ = check(tmp_path, status=1, make=make)
    assert made.endswith("--- failed: test-all lint\nFAILED tests/a.py::test_b - why\nE501\n")


def test_a_page_that_cannot_be_built_fails_the_run_and_is_named_at_its_end(tmp_path: Path) -> None:
    make = 'case $1 in site) echo "WARNING -  Doc file x.md contains a link y.md"; echo more; exit 1;; esac'
    made, _ = check(tmp_path, status=1, make=make)
    assert made.endswith("--- failed: site\nWARNING -  Doc file x.md contains a link y.md\n")


def test_the_output_of_a_set_up_that_fails_meanwhile_is_shown(tmp_path: Path) -> None:
    made, _ = check(tmp_path, make="case $1 in .venv*) echo no network; exit 1;; esac")
    assert "no network\n" in made


def test_a_failure_in_the_background_fails_the_run(tmp_path: Path) -> None:
    part = 'test-core) echo "FAILED tests/unit/a.py::test_b - why"; exit 1'
    made, _ = check(tmp_path, status=1, make=f'case $1 in {part};; *) echo "made $1";; esac')
    assert made.endswith("--- failed: test-core\nFAILED tests/unit/a.py::test_b - why\n")
    assert "made test-integrations" in made
