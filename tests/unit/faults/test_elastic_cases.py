"""The cases of Horovod's elastic integration tests that apply here, by their names; docs/chaos.md has the others."""

from __future__ import annotations

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

TRAINING = """
from apps.faults import Injector, parse_schedule
from mpi4py import MPI
me = MPI.COMM_WORLD.rank
faults = Injector(parse_schedule(FAULTS), me)
with faults.installed():
    comm = mpicomp.Communicator(faults.watch(MPI.COMM_WORLD), on_failure="regroup", timeout=60, ranks_per_node=2)
    top_k = mpicomp.LocalTopK(rate=10).start(comm, 1000)
    for step in range(4):
        faults.begin(step)
        mean = top_k.aggregate(np.full(1000, 1.0 + me, np.float32))
        faults.end()
tell(f"members-{me}", comm.members)
tell(f"steps-{me}", top_k.step)
comm.close()
"""


@pytest.mark.parametrize(
    ("faults", "survivors"),
    [
        # the first rank dies, as in test_single_rank_failure and test_fault_tolerance_without_scaling
        pytest.param("kill:0:1:middle", (1, 2, 3), id="test_single_rank_failure"),
        # a rank of each node dies, whereupon Horovod gives up both hosts; here the other ranks of the nodes go on
        pytest.param("kill:0:1:middle,kill:2:1:middle", (1, 3), id="test_all_hosts_blacklisted"),
    ],
)
def test_the_survivors_make_all_steps(jobs: Jobs, faults: str, survivors: tuple[int, ...]) -> None:
    job = jobs.run_warm(4, TRAINING, FAULTS=faults)
    status, output = job.finish()
    assert status == 0, output
    for rank in survivors:
        assert job.told(f"members-{rank}") == str(survivors)
        assert job.told(f"steps-{rank}") == "4"


def test_all_ranks_failure(jobs: Jobs) -> None:
    job = jobs.run_tolerant(3, TRAINING, FAULTS="kill:0:1:middle,kill:1:1:middle,kill:2:1:middle")
    status, output = job.finish()
    assert status == 1, output
    assert not [*job.folder.glob("members-*")]
