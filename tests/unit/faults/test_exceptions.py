"""Exceptions that leave a call on one rank alone: they are deaths, after which the other ranks go on."""

from __future__ import annotations

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

LEAVING = """
comm = mpicomp.Communicator(on_failure="regroup", timeout=NEVER_S, arrival_timeout=NEVER_S)
me, long_vector = comm.rank, np.ones(1_000_000, np.float32)

def leave(number, frame):
    if not comm.calls.ordered:  # between calls `sys.exit(0)` is the end of a program
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        return
    if END == "nested":
        comm.allreduce(1)
    if END == "exit 3":
        sys.exit(3)
    raise {"error": RuntimeError, "os": OSError, "memory": MemoryError, "interrupt": KeyboardInterrupt,
           "exit 0": SystemExit, "caught": RuntimeError}[END](0)

def train():
    while comm.size == 3:
        comm.allreduce(long_vector)

if me == 1:
    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    train()
except RuntimeError:
    if END != "caught":
        raise
tell(f"end-{me}", comm.members)
"""


@pytest.mark.parametrize("end", ["error", "os", "memory", "interrupt", "exit 0", "exit 3", "nested", "caught"])
def test_an_exception_that_leaves_a_call_of_one_rank_is_a_death(jobs: Jobs, end: str) -> None:
    job = jobs.run_tolerant(3, LEAVING, END=end)
    status, output = job.finish()
    assert [job.told(f"end-{rank}") for rank in (0, 2)] == ["(0, 2)"] * 2, output
    # a rank that ends with status 0, or has caught the exception, dies without a failure of its own
    assert status == (0 if end in ("exit 0", "caught") else 1), output
    assert "cannot end within allreduce" in output or end != "nested", output


ALL_CAUGHT = """
comm = mpicomp.Communicator(on_failure="regroup", timeout=NEVER_S, arrival_timeout=NEVER_S)

def leave(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, leave)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    while True:
        comm.allreduce(np.ones(1_000_000, np.float32))
except KeyboardInterrupt:
    tell(f"end-{comm.rank}")
"""


def test_ranks_that_all_catch_their_exception_end_with_status_0(jobs: Jobs) -> None:
    job = jobs.run_tolerant(3, ALL_CAUGHT)
    status, output = job.finish()
    assert status == 0, output
    assert all((job.folder / f"end-{rank}").exists() for rank in range(3))


REGROUPING = """
import threading
comm = mpicomp.Communicator(on_failure="regroup", timeout=NEVER_S, arrival_timeout=NEVER_S)
me = comm.rank
comm.barrier()

def interrupt():
    while not comm.recovery.is_active and comm.size == 4:
        time.sleep(0.0002)
    if comm.size < 4:  # on a busy machine this thread may miss the whole of it
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)

if me == 1:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
while comm.size > 2:
    comm.allreduce(np.ones(100_000, np.float32))
tell(f"end-{me}", comm.members)
"""


def test_an_exception_while_the_survivors_regroup_is_a_death_too(jobs: Jobs) -> None:
    job = jobs.run_tolerant(4, REGROUPING)
    _, output = job.finish()
    assert [job.told(f"end-{rank}") for rank in (2, 3)] == ["(2, 3)"] * 2, output
