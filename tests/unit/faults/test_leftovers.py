"""Jobs with deaths leave nothing behind: no process, no shared memory, no file but the states that are complete."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from apps.launch import files_in
from tests.unit.faults.jobs import Jobs, jobs

pytestmark = pytest.mark.timeout(300)
__all__ = ["jobs"]

# All ranks step together over shared memory and messages, and write a state after each step.
PROGRAM = """
from mpi4py import MPI
from apps.faults import Injector, fail_at
from collectives.atomic_file import replacing

faults = Injector([fail_at(*kill) for kill in KILLS], MPI.COMM_WORLD.rank)
with faults.installed():
    comm = mpicomp.Communicator(faults.watch(MPI.COMM_WORLD), timeout=60, ranks_per_node=2, on_failure=ON_FAILURE)
    tell(f"pid-{comm.members[comm.rank]}", os.getpid())
    total = mpicomp.Dense().start(comm, 100_000)
    between = mpicomp.PerNode(mpicomp.Marsit(4)).start(comm, 100_000)
    for step in range(8):
        faults.begin(step)
        vector = np.full(100_000, 1.0, np.float32)
        total.aggregate(vector)
        between.aggregate(vector)
        with faults.checkpoint(), replacing(FOLDER / f"state-{comm.members[comm.rank]}") as file:
            file.write(bytes([step]))
        faults.end()
    comm.close()
"""
RANKS = 6
KILLS = {
    "regroup": [(5, 1, "call-check"), (3, 2, "middle"), (0, 3, "before-barrier"), (4, 5, "residual")],
    "raise": [(1, 2, "middle")],
}


def _processes_of(folder: Path) -> list[str]:
    """Return the command lines of processes that were started with this folder for temporary files."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"TMPDIR={folder}".encode() in environ.read_bytes().split(b"\0"):
                found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.parametrize("on_failure", KILLS)
def test_nothing_of_a_job_stays_behind_after_deaths(jobs: Jobs, tmp_path: Path, on_failure: str) -> None:
    files, segments = tmp_path / "temporary", tmp_path / "segments"
    files.mkdir()
    segments.mkdir()
    memory = set(Path("/dev/shm").iterdir())
    env = {"TMPDIR": str(files), **files_in(str(segments))}
    job = jobs.run_warm(RANKS, PROGRAM, env, KILLS=KILLS[on_failure], ON_FAILURE=on_failure)
    status, output = job.finish()
    assert (status != 0) is ("PeerFailure" in output) is (on_failure == "raise"), output
    ended = [path.name for path in sorted(tmp_path.glob("state-*")) if path.read_bytes() == b"\7"]
    assert ended == (["state-1", "state-2"] if on_failure == "regroup" else []), output
    for rank in range(RANKS):
        job.await_end(job.pid(rank))
    job.wait_for(lambda: not _processes_of(files), "ended its launcher and all that this has started")
    assert not [*files.rglob("*")], "temporary files"
    assert not [*segments.rglob("*")], "shared memory of MPI"
    assert not [path for path in Path("/dev/shm").iterdir() if path not in memory and "mpicomp" in path.name]
    assert not [*tmp_path.glob(".*")], "files of states that are not complete"
