"""Ranks that are refused to train alone: environments of launchers, as found under real ones."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import mpicomp
from collectives import LauncherMismatch
from collectives.launcher import ALONE, problem, separated

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "b26"}
BATCH_SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}
STEP = BATCH_SHELL | {"SLURM_STEPID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("size", "environ", "launcher", "cure"),
    [
        (1, TORCHRUN, "torchrun started 2 processes (WORLD_SIZE=2)", "use mpirun"),
        (1, {"WORLD_SIZE": "8", "RANK": "0"}, "a launcher for torch.distributed started 8", "use mpirun"),
        (1, STEP, "srun started 4 processes (SLURM_STEP_NUM_TASKS=4)", "srun --mpi=pmix"),
        (1, STEP | {"PMI_SIZE": "4"}, "srun --mpi=pmi2 started 4", "srun --mpi=pmix"),
        (1, OPEN_MPI, "Open MPI's mpirun started 4 processes (OMPI_COMM_WORLD_SIZE=4)", "the mpirun beside"),
        (1, HYDRA, "MPICH's mpirun started 4 processes (PMI_SIZE=4)", "the mpirun beside"),
        (1, {"PMI_SIZE": "4"}, "an mpirun of MPICH's kind started 4", "the mpirun beside"),
        (1, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"} | TORCHRUN, "torchrun started 2", "use mpirun"),
        (2, OPEN_MPI, "MPI joins only 2 of them", "the mpirun beside"),
    ],
)
def test_processes_that_mpi_has_not_joined_are_told_launcher_variable_and_cure(
    size: int, environ: dict[str, str], launcher: str, cure: str
) -> None:
    text = problem(size, environ)
    assert launcher in text
    assert cure in text
    assert "Communicator(alone=True)" in text
    assert problem(size, environ | {ALONE: "1"}) == ""


@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (1, {}),
        (1, BATCH_SHELL),  # a program that a batch script starts alone
        (1, STEP | {"SLURM_STEP_NUM_TASKS": "1"}),
        (4, OPEN_MPI),
        (4, OPEN_MPI | STEP | {"SLURM_STEP_NUM_TASKS": "1"}),  # on a node where mpirun's daemon is a task of srun
        (4, HYDRA | STEP | {"SLURM_STEP_NUM_TASKS": "2"}),
        (1, OPEN_MPI | STEP | {"OMPI_COMM_WORLD_SIZE": "1"}),  # mpirun -n 1
        (4, OPEN_MPI | {"WORLD_SIZE": "4", "RANK": "1"}),  # for torch.distributed and MPI in one job
        (4, STEP),
        (8, STEP),  # of a heterogeneous job, which has several steps
        (1, {"WORLD_SIZE": "8"}),
        (1, {"PMI_SIZE": ""}),
    ],
)
def test_a_job_that_is_whole_may_run(size: int, environ: dict[str, str]) -> None:
    assert separated(size, environ) is None


def test_only_a_communicator_over_all_ranks_is_refused_and_only_if_that_is_not_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for comm in None, MPI.COMM_WORLD:
        with pytest.raises(LauncherMismatch, match=r"rank 0 of 1: torchrun started 2 processes \(WORLD_SIZE=2\)"):
            mpicomp.Communicator(comm)
    mpicomp.Communicator(alone=True).close()
    mpicomp.Communicator(MPI.COMM_SELF).close()
    assert mpicomp.run_local(2, lambda comm: comm.size) == [2, 2]
    monkeypatch.setenv(ALONE, "1")
    mpicomp.Communicator().close()
