"""Deaths under a launcher that lets ranks outlive others: all end at once, and the launcher reports a failure."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

WAITING = """
from collectives import PeerFailure
comm = mpicomp.Communicator(timeout=NEVER_S, arrival_timeout=NEVER_S)
tell(f"pid-{comm.rank}", os.getpid())
group = comm.split(0 if comm.rank in (0, 2) else 1)
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if comm.rank == 0:
        comm.allreduce(np.ones(100_000))
    else:
        group.recv(np.empty(10), 0)  # of a living rank, in a group without the dead one
except PeerFailure as error:
    tell(f"error-{comm.rank}", error)
    while not all((FOLDER / f"error-{rank}").exists() for rank in (0, 2)):
        time.sleep(0.01)  # the launcher ends ranks that are behind
    raise
"""


def test_ranks_that_wait_for_living_ones_learn_of_a_death_and_name_the_dead(jobs: Jobs) -> None:
    job = jobs.run_tolerant(3, WAITING)
    status, output = job.finish()
    assert status != 0, output
    for rank in (0, 2):
        assert re.search(r"rank 1( of COMM_WORLD)? died: see its output", job.told(f"error-{rank}"))


ENDING = """
comm = mpicomp.Communicator(timeout=NEVER_S, arrival_timeout=NEVER_S)
tell(f"pid-{comm.rank}", os.getpid())
comm.barrier()
if comm.rank == DEAD:
    os._exit(0) if QUIETLY else os.kill(os.getpid(), signal.SIGKILL)
comm.allreduce(np.ones(10))
"""


@pytest.mark.parametrize(("dead", "quietly"), [(0, False), (1, False), (1, True)])
def test_a_launcher_of_two_ranks_reports_the_death_of_one(jobs: Jobs, dead: int, quietly: bool) -> None:
    status, output = jobs.run_tolerant(2, ENDING, DEAD=dead, QUIETLY=quietly).finish()
    assert status != 0, output
    assert f"rank {dead} died" in output


LATE = """
import atexit
comm = mpicomp.Communicator(on_failure=MODE)
atexit.register(lambda: tell(f"ends-{me}"))  # runs just before the communicator's own handler
me = comm.rank
comm.barrier()
if END == "closed":
    comm.close()
if comm.rank == LAST:
    while not all((FOLDER / f"ends-{rank}").exists() for rank in range(comm.size) if rank != LAST):
        time.sleep(0.01)
    time.sleep(0.1)
    if END == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if END == "exits":
        sys.exit(3)
    if END == "exits at once":
        os._exit(3)
    raise RuntimeError("after the last call")
"""


@pytest.mark.parametrize("mode", ["raise", "regroup"])
@pytest.mark.parametrize(
    ("end", "last"), [("open", 0), ("open", 1), ("closed", 1), ("killed", 0), ("exits", 1), ("exits at once", 1)]
)
def test_a_rank_that_fails_after_the_last_call_leaves_no_other_waiting(
    jobs: Jobs, mode: str, end: str, last: int
) -> None:
    status, output = jobs.run_tolerant(3, LATE, MODE=mode, END=end, LAST=last).finish()
    assert bool(status) == (mode == "raise" or end != "killed"), output
    assert "NBC_Progress" not in output


GOING_ON = """
os.environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MPICOMP_END_LAUNCHER_AFTER": "0.1"}  # as with several nodes
comm = mpicomp.Communicator(on_failure="regroup")
me, end = comm.rank, time.monotonic() + 4.0
while comm.allreduce(int(time.monotonic() < end or comm.size == 3), "max"):
    if me == 1:
        {"error": lambda: float("one"), "sys.exit": lambda: sys.exit(3), "os._exit": lambda: os._exit(3)}[END]()
tell(f"end-{me}", comm.size)
"""


@pytest.mark.parametrize("end", ["error", "sys.exit", "os._exit"])
def test_a_job_that_goes_on_after_a_failure_keeps_its_launcher(jobs: Jobs, end: str) -> None:
    job = jobs.run_tolerant(3, GOING_ON, END=end)
    status, output = job.finish()
    assert [job.told(f"end-{rank}") for rank in (0, 2)] == ["2", "2"], output
    assert status == 1, output


EXITING = """
comm = mpicomp.Communicator(on_failure=MODE, timeout=NEVER_S, arrival_timeout=NEVER_S)
comm.barrier()
time.sleep(0.5)  # until all have left the barrier
if ALL or comm.rank == 1:
    os._exit(3)
comm.allreduce(1)
"""


@pytest.mark.parametrize(("mode", "everyone"), [("raise", False), ("raise", True), ("regroup", True)])
def test_os_exit_with_a_status_ends_the_job_with_it(jobs: Jobs, mode: str, everyone: bool) -> None:
    status, output = jobs.run_tolerant(3, EXITING, MODE=mode, ALL=everyone).finish()
    assert status == 3 if everyone else status != 0, output


FINALIZED = """
from mpi4py import MPI
comm = mpicomp.Communicator()
comm.close()
if comm.rank == 1:
    MPI.Finalize()
"""


def test_a_rank_that_finalizes_mpi_by_hand_waits_for_the_others(jobs: Jobs) -> None:
    status, output = jobs.run_tolerant(3, FINALIZED).finish()
    assert status == 0, output


MET = """
import threading
from collectives import process_end
comm = mpicomp.Communicator(on_failure=MODE)
comm.barrier()
if comm.rank == 1:
    await_others = process_end._await_others
    def exit_behind_it():
        reason = await_others()  # the others finalize MPI now
        tell("pid-1", os.getpid())
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
        threading.Thread(target=os._exit, args=(3,)).start()
        time.sleep(NEVER_S)
        return reason
    process_end._await_others = exit_behind_it
"""


@pytest.mark.parametrize("mode", ["raise", "regroup"])
def test_os_exit_of_a_thread_leaves_no_rank_in_mpi_finalize(jobs: Jobs, mode: str) -> None:
    job = jobs.run_tolerant(3, MET, MODE=mode)
    pid = job.pid(1)
    time.sleep(0.5)  # until the others finalize MPI
    job.process.send_signal(signal.SIGSTOP)  # as on busy cores: it sees all signs of the death at once
    (job.folder / "go").touch()
    job.await_end(pid)
    job.process.send_signal(signal.SIGCONT)
    start = time.monotonic()
    _, output = job.finish()
    assert time.monotonic() - start < JOB_S / 2, output
