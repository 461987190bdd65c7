"""Processes that a launcher started and MPI has not joined into one job.

A launcher of another MPI, or of no MPI, starts N processes, and each is alone in COMM_WORLD: N models would be trained
unnoticed, each on one N-th of the work. The size that launchers put into the environment reveals them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from collectives.children import ALONE

_OF_ANOTHER_MPI = "it belongs to another MPI than the library that mpi4py loaded: use the mpirun beside that library"
_NO_MPI = "it starts no MPI ranks: use mpirun"
_NO_PMIX = "use srun --mpi=pmix (srun --mpi=list shows what your Slurm has), or mpirun within the allocation"


class _Launcher(NamedTuple):
    """A launcher, and the variable in which its processes find their number.

    Attributes
    ----------
    name : str
    variable : str
        Holds the number of processes.
    cure : str
        Advice if MPI has joined fewer.
    also : str
        A variable that this launcher sets too; without it `variable` may be another launcher's.
    """

    name: str
    variable: str
    cure: str
    also: str = ""


# The one that started this very process comes first: torchrun may run in a task of srun, and so may mpirun. On remote
# nodes mpirun's own daemons are tasks of srun, whose number is not that of the ranks. SLURM_NTASKS is not looked at: it
# is the size of the allocation, also for a program that a batch script starts alone.
_LAUNCHERS = (
    _Launcher("torchrun", "WORLD_SIZE", _NO_MPI, also="TORCHELASTIC_RUN_ID"),
    _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", _OF_ANOTHER_MPI),
    _Launcher("MPICH's mpirun", "PMI_SIZE", _OF_ANOTHER_MPI, also="MPI_LOCALNRANKS"),
    _Launcher("srun --mpi=pmi2", "PMI_SIZE", _NO_PMIX, also="SLURM_STEP_NUM_TASKS"),
    _Launcher("an mpirun of MPICH's kind", "PMI_SIZE", _OF_ANOTHER_MPI),
    _Launcher("MPICH's mpirun", "MPI_LOCALNRANKS", _OF_ANOTHER_MPI),
    _Launcher("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", _OF_ANOTHER_MPI),
    _Launcher("flux run", "FLUX_JOB_SIZE", "use the MPI library that your Flux was made for, or mpirun"),
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", _NO_PMIX),
    _Launcher("a launcher for torch.distributed", "WORLD_SIZE", _NO_MPI, also="RANK"),
)


class Separated(NamedTuple):
    """A launcher started more processes than MPI has joined.

    Attributes
    ----------
    launcher : str
    started : int
        Processes.
    variable : str
        Variable that holds this number.
    cure : str
    """

    launcher: str
    started: int
    variable: str
    cure: str


def separated(size: int, environ: Mapping[str, str]) -> Separated | None:
    """Return the launcher that started more processes than the `size` ranks of COMM_WORLD, or None."""
    for name, variable, cure, also in _LAUNCHERS:
        started = environ.get(variable, "")
        if started.isdecimal() and (not also or also in environ):
            return Separated(name, int(started), variable, cure) if int(started) > size else None
    return None


def problem(size: int, environ: Mapping[str, str]) -> str:
    """Return why no job may run on these ranks: cause and cure in words; empty if it may run."""
    found = None if environ.get(ALONE, "0") == "1" else separated(size, environ)
    if found is None:
        return ""
    joined = "each is alone" if size == 1 else f"MPI joins only {size} of them"
    return (
        f"{found.launcher} started {found.started} processes ({found.variable}={found.started}), but {joined}, and "
        f"they would train separate models. {found.cure[0].upper()}{found.cure[1:]}. Where this is meant, use "
        f"Communicator(alone=True) or set {ALONE}=1"
    )
