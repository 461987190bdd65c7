"""Deaths under MPICH's launcher, which ends all other ranks: the output names the dead rank, and no memory stays."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from apps.launch import find_mpirun, mpirun_version
from tests.unit.faults.jobs import Jobs, jobs

RUN = [sys.executable, "-m", "mpicomp", "run"]


def has_mpich() -> bool:
    try:
        return "HYDRA" in mpirun_version(find_mpirun())
    except FileNotFoundError:
        return False


pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(not has_mpich(), reason="for MPICH: make test-mpich")]
__all__ = ["jobs"]

STEPPING = """
comm = mpicomp.Communicator(timeout=NEVER_S)
tell(f"pid-{comm.rank}", os.getpid())
average = mpicomp.Dense().start(comm, 50_000)
while True:
    average.aggregate(np.ones(50_000, np.float32))
"""

ENDING = """
comm = mpicomp.Communicator(timeout=NEVER_S)
tell(f"pid-{comm.rank}", os.getpid())
comm.barrier()
if END == "by an exception" and comm.rank == 1:
    raise RuntimeError("of one rank")
if END == "with a status" and comm.rank == 1:
    sys.exit(3)
if END == "by an exception":
    comm.barrier()
"""


def segments() -> set[Path]:
    return {*Path("/dev/shm").glob("mpich_shm_*")}


@pytest.fixture
def before() -> Iterator[set[Path]]:
    """Segments of MPICH that are there already; those of the test are removed."""
    found = segments()
    yield found
    for path in segments() - found:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("launcher", [["mpirun"], RUN], ids=["mpirun", "mpicomp run"])
@pytest.mark.parametrize(("n_ranks", "dead"), [(2, 0), (2, 1), (3, 0), (3, 2), (4, 1), (4, 3)])
def test_a_killed_rank_is_named_and_leaves_no_memory(
    jobs: Jobs, before: set[Path], launcher: Sequence[str], n_ranks: int, dead: int
) -> None:
    job = jobs.run_by(launcher, n_ranks, STEPPING)
    pids = [job.pid(rank) for rank in range(n_ranks)]
    assert segments() <= before
    time.sleep(0.1)
    os.kill(pids[dead], signal.SIGKILL)
    status, output = job.finish()
    assert status != 0
    assert f"rank {dead} of {n_ranks} (process {pids[dead]} on {os.uname().nodename}) died first" in output
    assert output.count("died first") == 1
    for pid in pids:
        job.await_end(pid)
    assert segments() <= before


@pytest.mark.parametrize(("end", "expected"), [("by itself", 0), ("by an exception", 1), ("with a status", 3)])
def test_no_rank_is_named_that_has_not_been_killed(jobs: Jobs, before: set[Path], end: str, expected: int) -> None:
    status, output = jobs.run(3, ENDING, END=end).finish()
    assert status == expected, output
    assert "died first" not in output
    assert segments() <= before
