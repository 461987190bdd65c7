"""Ranks under the CUDA-aware Open MPI that `build.sh` makes, with a GPU and without.

``MPICOMP_CUDA_MPI=PREFIX python -m pytest tests/system/gpu_mpi``: without the variable the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PREFIX = Path(os.environ.get("MPICOMP_CUDA_MPI", ""))
PROJECT = Path(__file__).resolve().parents[3]
# Settings of slurm/env.sh for the usual Open MPI, whose transports have other names, and cannot read a GPU.
OF_ANOTHER = ("OMPI_MCA_pml", "OMPI_MCA_btl", "PRTE_", "PMIX_", "OMPI_COMM_")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "MPICOMP_CUDA_MPI" not in os.environ, reason="MPICOMP_CUDA_MPI names no Open MPI made by build.sh"
    ),
]


def ranks(chosen: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OF_ANOTHER)}
    env |= {
        "LD_LIBRARY_PATH": str(PREFIX / "lib"),
        "MPI4PY_LIBMPI": str(PREFIX / "lib" / "libmpi.so"),
        "PYTHONPATH": str(PROJECT),
        "MPICOMP_GPU_MPI": chosen,
    }
    mpirun = [str(PREFIX / "bin" / "mpirun"), "--oversubscribe", "--allow-run-as-root", "-n", "2"]
    command = [*mpirun, sys.executable, str(Path(__file__).with_name("ranks.py"))]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_sums_have_the_hosts_bits_whether_or_not_the_claim_is_true() -> None:
    """Without a driver the library claims all the same that it takes memory of GPUs, and the probe finds it out."""
    for rank in told(ranks("auto")):
        assert rank["aware"]
        assert rank["same"]
        assert rank["works"] == torch.cuda.is_available(), rank["said"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_who_insists_without_a_gpu_is_told_on_all_ranks() -> None:
    done = ranks("on")
    assert done.returncode != 0
    assert all(f"rank {rank} of 2: MPICOMP_GPU_MPI=on, but MPI cannot" in done.stderr for rank in range(2)), done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_messages_go_directly() -> None:
    assert all(rank["same"] and rank["works"] for rank in told(ranks("on")))
