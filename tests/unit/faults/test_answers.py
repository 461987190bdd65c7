"""Several communicators that regroup: ranks that meet a death in different ones do not wait for each other for ever."""

from __future__ import annotations

import json

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

TWO_COMMUNICATORS = """
import json
from collectives import CollectiveError
from collectives.schedules.torus import Torus
first, second = (
    mpicomp.Communicator(on_failure="regroup", timeout=60, topology=Torus(2, 2) if one == "torus" else one)
    for one in TOPOLOGIES
)
me = first.rank
tell(f"pid-{me}", os.getpid())
first.barrier()
second.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
order = (first, second) if me == 0 else (second, first)  # 0 and 3 exchange messages with 1
found = {}
for _ in range(3):
    alive = [one for one in order if not found.get(one, "").startswith("PeerFailure")]
    handles = [(one, one.iallreduce(np.full(1000, 1.0 + me))) for one in alive]
    for one, handle in handles:
        try:
            found[one] = f"{handle.wait()[-1]} of {one.size}"
        except CollectiveError as error:
            found[one] = f"{type(error).__name__}: {error}"
tell(f"found-{me}", json.dumps([found[first], found[second]]))
"""


def test_two_communicators_regroup_though_the_ranks_meet_the_death_in_different_ones(jobs: Jobs) -> None:
    job = jobs.run_warm(4, TWO_COMMUNICATORS, TOPOLOGIES=("auto", "auto"))
    status, output = job.finish()
    assert status == 0, output
    for rank in (0, 2, 3):
        assert json.loads(job.told(f"found-{rank}")) == ["8.0 of 3", "8.0 of 3"]


def test_a_communicator_goes_on_though_another_one_cannot(jobs: Jobs) -> None:
    job = jobs.run_warm(4, TWO_COMMUNICATORS, TOPOLOGIES=("torus", "auto"))
    job.finish()
    for rank in (0, 2, 3):
        failed, went_on = json.loads(job.told(f"found-{rank}"))
        assert failed.startswith("PeerFailure: ")
        assert "rank 1 died, and the survivors cannot go on" in failed
        assert went_on == "8.0 of 3"


NO_CALL_IN_FLIGHT = """
from collectives import RanksLost
first, second = (mpicomp.Communicator(on_failure="regroup", timeout=60) for _ in range(2))
me = first.rank
tell(f"pid-{me}", os.getpid())
if DRIVEN:
    assert second.start_progress_thread()
first.barrier()
second.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if me == 0:
    try:
        first.recv(np.empty(1), source=1)
    except RanksLost:
        tell("lost")
total = second.allreduce(1)  # where the others wait for rank 0, and have no call of `first`
tell(f"found-{me}", [total, first.size, second.size, first.allreduce(1)])
"""


@pytest.mark.parametrize("driven", [False, True])
def test_a_rank_that_waits_elsewhere_answers_those_that_regroup(jobs: Jobs, driven: bool) -> None:
    job = jobs.run_warm(4, NO_CALL_IN_FLIGHT, DRIVEN=driven)
    status, output = job.finish()
    assert status == 0, output
    assert {job.told(f"found-{rank}") for rank in (0, 2, 3)} == {"[3, 3, 3, 3]"}
    job.told("lost")
