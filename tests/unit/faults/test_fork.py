"""Processes that a rank forks."""

from __future__ import annotations

import pytest

from tests.unit.faults.jobs import Jobs

FORKING = """
comm = mpicomp.Communicator(timeout=20)
aggregator = mpicomp.Marsit(10).start(comm, 1000)
x = np.ones(1000, np.float32)
aggregator.aggregate(x)
if comm.rank == 1:
    time.sleep(0.5)  # so that the call of rank 0 is in flight when it forks
handle = aggregator.begin(x)
if comm.rank == 0:
    child = os.fork()
    if child == 0:
        errors = []
        for call in handle.wait, lambda: aggregator.aggregate(x), comm.barrier:
            try:
                call()
            except mpicomp.CommunicatorClosed as error:
                errors.append(str(error))
        tell("errors", "|".join(errors))
        LEAVE
    tell("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
handle.wait()
comm.barrier()
tell(f"done-{comm.rank}")
"""
DRIVEN = FORKING.replace("aggregator =", "assert comm.start_progress_thread()\naggregator =", 1)
LEAVES = {"sys.exit(3)": 3, "sys.exit()": 0, "raise ValueError('of the child')": 1, "sys.exit('why')": 1}


@pytest.mark.parametrize(("program", "leave"), [*((FORKING, leave) for leave in LEAVES), (DRIVEN, "sys.exit(3)")])
def test_a_forked_child_cannot_communicate_and_its_exit_harms_neither_itself_nor_the_job(
    jobs: Jobs, program: str, leave: str
) -> None:
    job = jobs.run(2, program.replace("LEAVE", leave))
    status, output = job.finish()
    assert status == 0, output
    assert job.told("status") == str(LEAVES[leave])
    errors = job.told("errors").split("|")
    assert len(errors) == 3
    assert all("forked from a rank" in error for error in errors)
    assert job.told("done-0") == job.told("done-1") == ""
