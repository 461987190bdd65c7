"""A rank dies in close() once others have left it: these answer those that have not."""

from __future__ import annotations

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

DEATH_IN_CLOSE = """
from collectives.recovery import farewell
comm = mpicomp.Communicator(on_failure="regroup", timeout=20, arrival_timeout=NEVER_S, ranks_per_node=RANKS_PER_NODE)
me, size = comm.rank, comm.size
tell(f"pid-{me}", os.getpid())
comm.allreduce(1.0)
if RANKS_PER_NODE:
    comm.nodes
rounds_of = farewell.rounds_of
def rounds_of_a_rank_that_dies(*place):
    for number, one in enumerate(rounds_of(*place)):
        if number == DIES_BEFORE:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        yield one
if me == 0:
    farewell.rounds_of = rounds_of_a_rank_that_dies
comm.close()
tell(f"closed-{me}")
# without a call of MPI, until the others have left close()
deadline = time.monotonic() + 60
while time.monotonic() < deadline and len([*FOLDER.glob("closed-*")]) < size - 1:
    time.sleep(0.01)
tell(f"seen-{me}", len([*FOLDER.glob("closed-*")]))
"""


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@pytest.mark.parametrize(("n_ranks", "dies_before"), [(3, 2), (4, 1), (7, 2)])
def test_ranks_that_have_closed_answer_others_after_a_death(
    jobs: Jobs, n_ranks: int, dies_before: int, ranks_per_node: int | None
) -> None:
    job = jobs.run_warm(n_ranks, DEATH_IN_CLOSE, DIES_BEFORE=dies_before, RANKS_PER_NODE=ranks_per_node)
    status, output = job.finish()
    assert status == 0, output
    assert "rank 0 died" in output
    assert [job.told(f"seen-{rank}") for rank in range(1, n_ranks)] == [str(n_ranks - 1)] * (n_ranks - 1), output
