"""The launcher ends with a failure if all ranks die, and with the ranks' own status if one of them ends by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

ENDS = """
me = int(os.environ["OMPI_COMM_WORLD_RANK"])
comm = mpicomp.Communicator(on_failure=MODE, timeout=20)
if me == 0:
    tell("witness", Path(f"/proc/self/task/{os.getpid()}/children").read_text())
comm.barrier()
if END == "all at once":
    os.kill(os.getpid(), signal.SIGKILL)
if END == "one by one":
    for rank in range(comm.size):
        if me == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
if END == "with children" and os.fork() == 0:  # which have all that the rank has open
    os.closerange(0, 3)
    tell(f"pid-{me}", os.getpid())
    time.sleep(NEVER_S)
if END == "with children":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if END == "but one" and me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if END == "os._exit":
    os._exit(0)
comm.barrier()
"""


def finish(jobs: Jobs, n_ranks: int, end: str, mode: str = "regroup") -> tuple[int, str]:
    job = jobs.run_tolerant(n_ranks, ENDS, MODE=mode, END=end)
    status, output = job.finish()
    job.await_end(int(job.told("witness")))
    return status, output


@pytest.mark.parametrize(
    ("n_ranks", "end", "mode"),
    [
        (1, "all at once", "regroup"),
        (1, "all at once", "raise"),
        (3, "all at once", "regroup"),
        (5, "all at once", "raise"),
        (3, "one by one", "regroup"),
    ],
)
def test_a_job_fails_if_all_ranks_die(jobs: Jobs, n_ranks: int, end: str, mode: str) -> None:
    status, output = finish(jobs, n_ranks, end, mode)
    assert status == 1, output
    text = f"all {n_ranks} ranks have died" if n_ranks > 1 else "the only rank has died"
    assert output.count(text) == 1


def test_a_job_fails_if_all_ranks_die_though_their_children_live(jobs: Jobs) -> None:
    status, output = finish(jobs, 2, "with children")
    assert status == 1, output
    assert all(Path(f"/proc/{pid.read_text()}/exe").exists() for pid in jobs.folder.glob("pid-*"))


@pytest.mark.parametrize("end", ["none", "but one", "os._exit"])
def test_a_job_in_which_a_rank_ends_by_itself_succeeds(jobs: Jobs, end: str) -> None:
    status, output = finish(jobs, 2, end)
    assert status == 0, output
    assert "the job ends with status" not in output
