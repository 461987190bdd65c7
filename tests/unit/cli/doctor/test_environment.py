"""Threads against cores, and MPI's needs at its start: findings of `mpicomp doctor` about a machine's resources."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mpicomp.cli.doctor import environment
from mpicomp.cli.doctor.environment import memory_limit, quota


@pytest.mark.parametrize(
    ("n_ranks", "environ", "own_cores", "host_cores", "status", "told"),
    [
        (1, {}, 4, 4.0, "ok", "no limit set"),
        (2, {}, 4, 4.0, "warn", "each of 2 ranks may start 4 threads, and there are 4 cores"),
        (2, {}, 1, 2.0, "ok", "no limit set"),  # bound: pools take the cores that a process may run on
        (1, {}, 64, 1.0, "warn", "the rank may start 64 threads, and there are 1 cores"),
        (2, {"OMP_NUM_THREADS": "1"}, 2, 2.0, "ok", "OMP_NUM_THREADS=1"),
        (8, {"OMP_NUM_THREADS": "1"}, 2, 2.0, "ok", "OMP_NUM_THREADS=1"),  # the line "cores" says that ranks share
        (1, {"OMP_NUM_THREADS": "64"}, 1, 1.0, "warn", "OMP_NUM_THREADS=64: the rank may start 64 threads"),
        (2, {"OMP_NUM_THREADS": "2"}, 4, 4.0, "ok", "OMP_NUM_THREADS=2"),
        (2, {"OMP_NUM_THREADS": "4"}, 4, 4.0, "warn", "each of 2 ranks may start 4 threads"),
        (2, {"OMP_NUM_THREADS": "2"}, 1, 2.0, "warn", "1 of them for a rank"),
        (1, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "16"}, 4, 4.0, "warn", "may start 16 threads"),
        (1, {"OMP_NUM_THREADS": "4,2"}, 4, 4.0, "ok", "OMP_NUM_THREADS=4,2"),
        (1, {"OMP_NUM_THREADS": "many"}, 4, 4.0, "ok", "OMP_NUM_THREADS=many"),
    ],
)
def test_more_threads_than_cores_are_a_warning(
    n_ranks: int, environ: dict[str, str], own_cores: int, host_cores: float, status: str, told: str
) -> None:
    finding = environment.threads(n_ranks, environ, own_cores, host_cores)
    assert finding.status == status
    assert told in finding.text
    assert ("OMP_NUM_THREADS=" in finding.cure) == (status == "warn")


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/../other\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, math.inf),
        ("2:cpuset:/\n", {}, math.inf),
    ],
)
def test_the_limit_of_a_control_group_is_found(own: str, files: dict[str, str], cores: float, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert quota(tmp_path / "root", tmp_path / "own") == cores


@pytest.mark.parametrize(
    ("own", "files", "limit", "left"),
    [
        (
            "0::/job/step\n",
            {"job/step/memory.max": "max\n", "job/memory.max": "8000\n", "job/memory.current": "3000\n"},
            8000,
            5000,
        ),
        ("0::/\n", {"memory.max": "8000\n"}, 8000, 8000),
        (
            "4:memory:/a\n3:cpu:/\n",
            {"memory/a/memory.limit_in_bytes": "4000\n", "memory/a/memory.usage_in_bytes": "1000"},
            4000,
            3000,
        ),
        ("3:cpu:/\n", {"memory/memory.limit_in_bytes": "4000"}, math.inf, math.inf),
    ],
)
def test_the_memory_of_a_control_group_is_found(
    own: str, files: dict[str, str], limit: float, left: float, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert memory_limit(tmp_path / "root", tmp_path / "own") == limit
    assert memory_limit(tmp_path / "root", tmp_path / "own", left=True) == left


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert quota(tmp_path, tmp_path / "missing") == math.inf


@pytest.mark.parametrize(
    ("environ", "folder", "told"),
    [
        ({"HOME": "/root"}, "/tmp", []),
        ({}, "/tmp", ["HOME is not set, without which Open MPI does not start"]),
        ({"HOME": ""}, "/tmp", ["HOME is not set, without which Open MPI does not start"]),
        ({"HOME": "/root"}, "/proc", ["/proc has room for 0 MiB, and Open MPI takes 16 MiB for the ranks of a host"]),
        ({"HOME": "/root"}, "/none", ["/none cannot be used (No such file or directory)"]),
        ({"HOME": "/root", "OMPI_MCA_btl_sm_backing_directory": "/tmp"}, "/none", []),
        (
            {"HOME": "/root", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            "/proc",
            ["/proc has room for 0 MiB, and Open MPI takes 64 MiB for the ranks of a host"],
        ),
    ],
)
def test_causes_that_keep_mpi_from_starting_are_found_before_it_is_loaded(
    environ: dict[str, str], folder: str, told: list[str]
) -> None:
    found = environment.obstacles(environ, Path(folder))
    assert [finding.text for finding in found] == told
    assert all(finding.cure for finding in found)


def test_a_folder_for_temporary_files_that_takes_none_is_found_before_mpi_is_loaded(tmp_path: Path) -> None:
    for usable in (tmp_path, tmp_path / "not yet there"):
        assert not environment.obstacles({"HOME": "/tmp", "TMPDIR": str(usable)}, tmp_path)
    [found] = environment.obstacles({"HOME": "/tmp", "TMPDIR": "/proc"}, tmp_path)
    assert (found.status, found.text) == (
        "warn", "TMPDIR=/proc takes no files (No such file or directory), without which Open MPI does not start"
    )  # fmt: skip
