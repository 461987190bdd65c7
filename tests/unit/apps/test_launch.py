"""Jobs are started with the project's environment, and ended when they take too long."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from apps import launch
from apps.launch import PROJECT, TIMED_OUT, JobFailed, files_in, find_mpirun, mpi_environment, run, run_or_raise


def test_a_job_that_hangs_is_told_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('told')); print(1); time.sleep(60)"
    assert run([sys.executable, "-uc", deaf], os.environ, timeout_s=2) == (TIMED_OUT, "1\ntold\n")


def test_a_job_starts_beside_the_files_of_killed_launchers(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    for pid in range(os.getpid(), os.getpid() + 1000):  # one of them will be the launcher's
        left = tmp_path / f"ompi.{pid}"
        left.mkdir()
        (left / f"pmix.{platform.node()}.tool").touch()
        (left / f"pmix.{platform.node()}.tool.{pid}").touch()
    env = {**mpi_environment(), "TMPDIR": str(tmp_path), **files_in(str(private))}
    assert run([find_mpirun(), "-n", "1", "true"], env, timeout_s=60) == (0, "")
    assert not [*private.iterdir()]


def test_a_job_that_fails_says_how() -> None:
    said = "import sys; print('no such part'); sys.exit(3)"
    with pytest.raises(JobFailed, match=r"the study ended with status 3; its last output was:\nno such part"):
        run_or_raise("the study", [sys.executable, "-c", said], os.environ, 60)


def test_output_that_is_no_text_is_shown_all_the_same() -> None:
    said = r"import sys; sys.stdout.buffer.write(b'caf\xe9')"
    assert run([sys.executable, "-c", said], os.environ) == (0, "caf\ufffd")


def test_jobs_have_the_environment_of_the_batch_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = mpi_environment()
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["PYTHONPATH"] == f"{PROJECT}{os.pathsep}/elsewhere"


def test_the_launcher_beside_a_python_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpirun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert find_mpirun(tmp_path / "own" / "python") == str(tmp_path / "own" / "mpirun")
    assert find_mpirun(tmp_path / "none" / "python") == str(tmp_path / "other" / "mpirun")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pip install"):
        find_mpirun(tmp_path / "none" / "python")
