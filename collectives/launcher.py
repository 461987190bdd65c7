"""Processes that are no ranks of the job, though a launcher or a rank has started them.

A launcher of another MPI, or of no MPI, starts N processes, and each is alone in COMM_WORLD: N models would be trained
unnoticed, each on one N-th of the work. The size that launchers put into the environment reveals them.

A process that a rank starts has the variables by which MPI finds the rank's job. If it initializes MPI, it takes the
rank's place: the rank then dies of a segmentation fault or waits for ever. So a rank leaves a mark in its environment.
A process with the mark of another process, and the same variables, loads mpi4py without initializing MPI.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import current_process, util
from types import TracebackType
from typing import Any, NamedTuple

import mpi4py

ALONE = "MPICOMP_ALONE"
MARK = "MPICOMP_RANK_PROCESS"  # process and name of the rank, the socket and the variables by which it found its job
_WITHOUT_MPI = "MPI4PY_RC_INITIALIZE"
# By these a process finds the job that it is a rank of. Open MPI's other settings, such as the transport, stay.
LAUNCHERS = (
    "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_", "OMPI_NUM_APP", "OMPI_FIRST_RANKS", "OMPI_MCA_ess",
    "OMPI_MCA_orte_", "OMPI_MCA_pmix", "PRTE_", "PMIX_", "PMI_", "PMI2_", "PALS_", "HYDI_", "HYDRA_",
    "MPI_LOCAL", "MV2_COMM_WORLD_", "MPISPAWN_", "FLUX_", "SLURM_",
)  # fmt: skip
# Those that are another rank's or another job's as soon as one of them differs.
_PLACES = (
    "PMIX_NAMESPACE", "PMIX_RANK", "PMI_JOBID", "PMI_ID", "PMI_PORT", "PMI_RANK", "PMI_FD", "MPISPAWN_ID",
    "FLUX_JOB_ID", "FLUX_TASK_RANK", "PALS_APID", "PALS_RANKID",
)  # fmt: skip
_OF_ANOTHER_MPI = "it belongs to another MPI than the library that mpi4py loaded: use the mpirun beside that library"
_NO_MPI = "it starts no MPI ranks: use mpirun"
_NO_PMIX = "use srun --mpi=pmix (srun --mpi=list shows what your Slurm has), or mpirun within the allocation"


# Processes that MPI has not joined ------------------------------------------------------------------------------------


class _Launcher(NamedTuple):
    """A launcher, and the variable in which its processes find their number."""

    name: str
    variable: str  # holds the number of processes
    cure: str  # advice if MPI has joined fewer
    also: str = ""  # variable that this launcher sets too; without it `variable` may be another launcher's


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


# Variables of the rank and the number of ranks, in the job and on a node
_JOB = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # last: under mpirun it is the daemon's
)
_NODE = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH
)


class Separated(NamedTuple):
    """A launcher that started more processes than MPI has joined."""

    launcher: str
    started: int  # processes
    variable: str  # holds this number
    cure: str


def separated(size: int, environ: Mapping[str, str]) -> Separated | None:
    """Return the launcher that started more processes than the `size` ranks of COMM_WORLD, or None."""
    for name, variable, cure, also in _LAUNCHERS:
        started = environ.get(variable, "")
        if started.isdecimal() and (not also or also in environ):
            return Separated(name, int(started), variable, cure) if int(started) > size else None
    return None


def launched_by(environ: Mapping[str, str]) -> str:
    """Return the launcher that has started this process as a rank, in words; empty if it may start a job.

    A shell in an allocation may be the only task of an srun, and a notebook the only rank of a process group. A lone
    rank of an mpirun is still a rank.
    """
    for name, variable, _, also in _LAUNCHERS:
        started = environ.get(variable, "")
        may_be_alone = "SLURM_STEP_NUM_TASKS" in (variable, also) or (variable, also) == ("WORLD_SIZE", "RANK")
        if started.isdecimal() and (not also or also in environ) and (int(started) > 1 or not may_be_alone):
            return name
    return ""


def place_in_job(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, as the launcher counts them; None: they are not known."""
    return next(_pairs(environ, _JOB), None)


def place_on_node(environ: Mapping[str, str], size: int) -> dict[str, int]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE of a rank of `size`, as far as the launcher provides them."""
    if size == 1:
        return {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for rank, count in _pairs(environ, _NODE):
        return {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    if not environ.get("SLURM_LOCALID", "").isdecimal():
        return {}
    # Slurm writes the numbers of tasks of all nodes as "2(x3),1".
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, nodes in found for _ in range(int(nodes or 1))]
    node = environ.get("SLURM_NODEID", "")
    known = {"LOCAL_WORLD_SIZE": tasks[int(node)]} if node.isdecimal() and int(node) < len(tasks) else {}
    return {"LOCAL_RANK": int(environ["SLURM_LOCALID"]), **known}


def _pairs(environ: Mapping[str, str], names: Sequence[tuple[str, str]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of numbers that are set."""
    for one, other in names:
        if environ.get(one, "").isdecimal() and environ.get(other, "").isdecimal():
            yield int(environ[one]), int(environ[other])


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


# Processes that a rank has started ------------------------------------------------------------------------------------


class Parent(NamedTuple):
    """A rank that has started this process, in words as in ``"rank 1 of 4"``."""

    pid: int
    here: str


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process is no rank of this job, and finds the same MPI and GPUs otherwise."""
    return {name: value for name, value in environ.items() if not name.startswith((*LAUNCHERS, MARK))}


def mark(here: str) -> None:
    """Mark the environment of this process, in which MPI is initialized; `here` names the rank."""
    place = _place()
    if place and parent() is None:
        os.environ[MARK] = f"{os.getpid()} {_socket() or 0} {place} {here}"
        _keep_mpi_out_of_interpreters()


def parent() -> Parent | None:
    """Return the rank that started this process; None: this process may be a rank itself."""
    pid, _, rest = os.environ.get(MARK, "").partition(" ")
    socket, _, rest = rest.partition(" ")
    place, _, here = rest.partition(" ")
    if not here or int(pid) == os.getpid() or place != _place():
        return None
    # MPICH's ranks of another job have the same variables, and a socket of their own
    return Parent(int(pid), here) if _socket() in {None, int(socket)} else None


def leave_mpi_uninitialized() -> None:
    """Load mpi4py without initializing MPI in a process that a rank has started, unless it is meant to be alone."""
    if parent() is not None:
        if os.environ.get(ALONE, "0") == "1":
            forget_launcher()
        else:
            mpi4py.rc.initialize = False


def forget_launcher() -> None:
    """Remove the variables of the rank's launcher: MPI then makes a job of this process alone."""
    kept = without_launcher(os.environ)
    for name in set(os.environ) - set(kept):
        del os.environ[name]


def problem_of_child() -> str:
    """Return why this process is no rank: cause and cure in words; empty if a rank has not started it."""
    rank = parent()
    if rank is None:
        return ""
    _end_the_rank_of_a_pool(rank.pid)
    return (
        f"process {os.getpid()} was started by {rank.here} and is no rank itself: MPI cannot be used here. Make the "
        'communicator in the rank alone, under `if __name__ == "__main__":` where worker processes import the program, '
        f"and give workers plain data. A program that needs no other rank may set {ALONE}=1"
    )


def _place() -> str:
    """Return the variables by which MPI finds its place in a job; empty where no launcher has set any."""
    return ",".join(f"{name}={os.environ[name].replace(' ', '_')}" for name in _PLACES if name in os.environ)


def _socket() -> int | None:
    """Return the inode of the socket to MPICH's launcher; None if this process has no such socket."""
    with suppress(KeyError, ValueError, OSError):
        found = os.fstat(int(os.environ["PMI_FD"]))
        if stat.S_ISSOCK(found.st_mode):
            return found.st_ino
    return None


def _keep_mpi_out_of_interpreters() -> None:
    """Have interpreters that multiprocessing starts load mpi4py without MPI, even where the program loads it first."""
    start, changing = util.spawnv_passfds, threading.Lock()

    def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        with changing:
            before = os.environ.get(_WITHOUT_MPI)
            os.environ[_WITHOUT_MPI] = "0"
            try:
                return start(path, args, passfds)
            finally:
                del os.environ[_WITHOUT_MPI]
                if before is not None:
                    os.environ[_WITHOUT_MPI] = before

    util.spawnv_passfds = spawnv_passfds


def _end_the_rank_of_a_pool(rank: int) -> None:
    """End the rank if the program cannot be imported: a `multiprocessing.Pool` would start workers again for ever."""
    process, report = current_process(), sys.excepthook
    if "PoolWorker" not in process.name or not hasattr(process, "_inheriting"):
        return

    def report_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(kind, error, trace)
        os.kill(rank, signal.SIGTERM)

    # called where the import fails, and for nothing else: an error of a worker's task goes to the rank
    sys.excepthook = report_and_end
