"""The variables of torchrun under launchers that do not set them."""

from __future__ import annotations

import pytest

from mpicomp.torch.process_group.registration import set_variables

OPEN_MPI = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}


@pytest.mark.parametrize(
    ("rank", "size", "launcher", "on_node"),
    [
        (3, 4, OPEN_MPI, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        (3, 4, HYDRA, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        (4, 5, SRUN, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
        (1, 5, SRUN | {"SLURM_LOCALID": "1", "SLURM_NODEID": "0"}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        (1, 2, {"SLURM_LOCALID": "1"}, {"LOCAL_RANK": "1"}),
        (0, 1, {}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
        (1, 2, {}, {}),  # an unknown launcher
        (3, 4, OPEN_MPI | {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}),  # one GPU is visible
    ],
)
def test_missing_variables_are_set(rank: int, size: int, launcher: dict[str, str], on_node: dict[str, str]) -> None:
    environ = dict(launcher)
    set_variables(rank, size, environ)
    assert environ == launcher | {"RANK": str(rank), "WORLD_SIZE": str(size)} | on_node


def test_variables_of_a_launcher_are_kept() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}
    environ = dict(torchrun)
    set_variables(1, 2, environ | OPEN_MPI)  # ranks need not be MPI's
    set_variables(1, 2, environ)
    assert environ == torchrun


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (
            {"WORLD_SIZE": "4", "RANK": "0"},
            "WORLD_SIZE is 4, and MPI has started 2 ranks: start .*mpirun -n 4",
        ),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE is 1, and MPI has started 2 ranks"),
        ({"RANK": "2"}, "rank 1 of 2: RANK is 2, and must lie in 0 .. 1: unset RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is -1"),
        ({"RANK": "one"}, "RANK is 'one', and must be a whole number"),
    ],
)
def test_variables_that_contradict_mpi_are_refused(environ: dict[str, str], problem: str) -> None:
    before = dict(environ)
    with pytest.raises(ValueError, match=problem):
        set_variables(1, 2, environ)
    assert environ == before
