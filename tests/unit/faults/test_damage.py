"""A damaged message raises one error on all ranks, though the rank that finds it ends at once."""

from __future__ import annotations

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs, jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)
__all__ = ["jobs"]

# Rank 1 finds the damage. Rank 2 comes to the call after it: by then rank 1 might be dead, and the others regrouping.
PROGRAM = """
from mpi4py import MPI
from apps.faults import Injector, corrupt_at
from collectives import DamagedMessage

rank = MPI.COMM_WORLD.rank
faults = Injector([corrupt_at(0, 2, "before-call")], rank)
with faults.installed():
    comm = mpicomp.Communicator(faults.watch(MPI.COMM_WORLD), timeout=20, on_failure="regroup", checksums=True)
    try:
        for step in range(5):
            faults.begin(step)
            if step == 2 and rank == 2:
                time.sleep(0.1)
            comm.allreduce(np.ones(1000))
            faults.end()
        tell(f"ended-{rank}", f"all steps, {comm.size} ranks")
    except DamagedMessage as error:
        tell(f"ended-{rank}", type(error).__name__)
    os._exit(0)
"""


def test_all_ranks_raise_the_error_of_a_damaged_message_before_one_of_them_ends(jobs: Jobs) -> None:
    job = jobs.run_warm(3, PROGRAM)
    assert [job.told(f"ended-{rank}") for rank in range(3)] == ["DamagedMessage"] * 3, job.output
