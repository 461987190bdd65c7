"""Settings of every MPI job: ``mpicomp run`` sets them, and ``slurm/env.sh`` exports the same ones to a shell.

``python -m mpicomp.cli.run.environment`` prints them as lines for a shell. Variables that the user has set win.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from typing import NamedTuple

from mpicomp.cli.run.allocation import Allocation, find_allocation

# NAME=VALUE of the settings below that were set for one machine and one number of ranks. A job that starts from a shell
# with these settings, or from a batch script that sbatch has passed them to, chooses them again unless the user has
# changed them.
MARK = "MPICOMP_ONE_MACHINE"
THREADS = "OMP_NUM_THREADS"
IS_THREADS = re.compile(r" *[1-9]\d*( *, *[1-9]\d*)* *").fullmatch  # a number for each nested level
_BINDING = "PRTE_MCA_hwloc_default_binding_policy"

MEMORY = {
    # Let PyTorch allocate large tensors in huge pages: each step's gradients are new memory, which the system clears
    # page by page. This has no effect if the kernel offers no huge pages.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Let glibc keep up to 1 GiB of freed memory, and serve blocks of up to 32 MiB from it. By its own limits some
    # processes return memory in every step, and the system clears it again: hundreds of page faults a step.
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}
"""Settings of a process for its memory, which a launcher has to pass to other hosts."""
# Open MPI sends messages over TCP of up to 64 KiB eagerly, and longer ones only after a handshake. With a higher limit
# messages are fewer and longer; mpicomp cuts its packed payloads to this limit.
_EVERYWHERE = {
    **MEMORY,
    "OMPI_MCA_btl_tcp_eager_limit": "270336",
    "OMPI_MCA_btl_tcp_rndv_eager_limit": "270336",
    "OMPI_MCA_btl_tcp_max_send_size": "270336",
    # Over a binary tree, its default, Open MPI 5.0.11's agreement of survivors does not end in some cases of several
    # deaths within milliseconds: 5 of 250 jobs of one case, and none of 240 over a star.
    "OMPI_MCA_coll_ftagree_era_topology": "2",
}
# Open MPI refuses to start as root unless both variables are set; containers and CI often have no other user.
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# On one machine, with perhaps more ranks than cores: let ranks share cores, move between them and yield while they
# wait. Naming the transports saves a second of probing for networks at the start. In an allocation MPI chooses: it
# knows the nodes, their cores and their network better than we do.
_ON_ONE_MACHINE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    _BINDING: "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}


class Settings(NamedTuple):
    """Variables to set, and variables of an earlier choice to remove."""

    added: dict[str, str]
    removed: tuple[str, ...]

    def apply(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with these settings."""
        return {name: value for name, value in environ.items() if name not in self.removed} | self.added


def choose(environ: Mapping[str, str], n_threads: int, one_machine: bool) -> Settings:
    """Return the settings for ranks of so many threads, on this machine alone or on the hosts of an allocation."""
    earlier = dict(pair.split("=", 1) for pair in environ.get(MARK, "").split() if "=" in pair)
    users = {name for name, value in environ.items() if value and value != earlier.get(name)}
    if not IS_THREADS(environ.get(THREADS, "")):
        users.discard(THREADS)
    # One thread a core: the ranks share the cores, and thread pools of NumPy or torch would compete for them.
    chosen = {THREADS: str(n_threads)}
    if one_machine:
        chosen |= _ON_ONE_MACHINE
    elif (environ[THREADS] if THREADS in users else str(n_threads)) != "1":
        chosen[_BINDING] = "none"  # Open MPI would bind all threads of a rank to one core
    chosen = {name: value for name, value in chosen.items() if name not in users}
    added = {name: value for name, value in _EVERYWHERE.items() if name not in users} | chosen
    if os.geteuid() == 0:
        added |= _AS_ROOT
    if chosen:
        added[MARK] = " ".join(f"{name}={value}" for name, value in chosen.items())
    gone = (name for name in (*earlier, MARK) if name in environ and name not in added and name not in users - {MARK})
    return Settings(added, tuple(gone))


def threads(environ: Mapping[str, str], placed: list[tuple[int | None, int]]) -> int:
    """Return the threads of a rank, from the cores and ranks of each host."""
    # Slurm's cores per task come first
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdecimal() and len(per_task) < 10 and "SLURM_JOB_ID" in environ:
        return max(1, int(per_task))
    # ranks of the host where they have fewest cores decide
    return max(1, min((cores // ranks if cores and ranks else 1 for cores, ranks in placed), default=1))


def for_shell(environ: Mapping[str, str]) -> Settings:
    """Return the settings of a shell: for as many ranks as the allocation has slots, or any number on this machine."""
    found: Allocation | None = find_allocation(environ)
    hosts = () if found is None else found.hosts
    return choose(environ, threads(environ, [(host.cores, host.slots) for host in hosts]), found is None)


def main() -> int:
    """Print the settings as lines for a shell."""
    try:
        settings = for_shell(os.environ)
    except ValueError as error:
        print(f"slurm/env.sh: {error}", file=sys.stderr)
        return 1
    for name in settings.removed:
        print(f"unset {name}")
    for name, value in settings.added.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
