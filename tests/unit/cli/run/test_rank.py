"""A rank of ``mpicomp run --gpus``: torchrun's variables from those of each launcher, and the program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpicomp.cli.run.rank import main, variables
from tests.documents import PROJECT

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
EXPECTED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "launcher", [OPEN_MPI, HYDRA, SRUN, OPEN_MPI | DAEMON], ids=["mpirun", "hydra", "srun", "both"]
)
def test_the_variables_are_those_of_torchrun(launcher: dict[str, str]) -> None:
    assert variables(launcher) == EXPECTED
    assert variables(launcher | {"RANK": "0", "WORLD_SIZE": "1"}) == EXPECTED  # of a notebook that starts the job


@pytest.mark.parametrize("launcher", [{}, {"PMI_RANK": "1", "PMI_SIZE": "2"}], ids=["none", "no place on the node"])
def test_an_unknown_launcher_is_refused_in_one_line(
    launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", launcher)
    assert main(["true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mpicomp run: error: --gpus: the launcher does not number its ranks in variables that")
    assert error.count("\n") == 1


def test_the_rank_becomes_the_program_with_its_arguments() -> None:
    program = "import os, sys; print(os.getpid(), os.environ['LOCAL_RANK'], *sys.argv[1:])"
    command = [sys.executable, "-m", "mpicomp.cli.run.rank", sys.executable, "-c", program, "--x", "a b"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    with subprocess.Popen(
        command, env=environ | OPEN_MPI | {"PYTHONPATH": str(PROJECT)}, stdout=subprocess.PIPE, text=True
    ) as process:
        printed, _ = process.communicate(timeout=60)
    assert printed == f"{process.pid} 1 --x a b\n"
    assert process.returncode == 0
