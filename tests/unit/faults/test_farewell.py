"""A rank dies in close() once others have left it: these answer those that have not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

DEATH_IN_CLOSE = """
from collectives.recovery import farewell
comm = mpicomp.Communicator(on_failure="regroup", timeout=60, arrival_timeout=NEVER_S, **OPTIONS)
me, size = comm.rank, comm.size
tell(f"pid-{me}", os.getpid())
comm.allreduce(1.0)
if "ranks_per_node" in OPTIONS:
    comm.nodes
if HAS_SECOND:
    second = mpicomp.Communicator(on_failure="regroup", timeout=60, arrival_timeout=NEVER_S)
    if me:
        handle = second.iallreduce(np.ones(1000, np.float32))
if RECEIVES:
    message = comm.irecv(np.empty(1), (me + 1) % size)
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
if HAS_SECOND:
    tell(f"sum-{me}", handle.wait()[0])
# without a call of MPI, until the others have left close()
deadline = time.monotonic() + 60
while STAYS and time.monotonic() < deadline and len([*FOLDER.glob("closed-*")]) < size - 1:
    time.sleep(0.01)
"""


def close(jobs: Jobs, n_ranks: int, dies_before: int, *, status: int = 0, **constants: Any) -> None:
    """Run a job whose rank 0 dies in close(); all others leave it, the first of them while rank 0 lives."""
    given = {"OPTIONS": {}, "HAS_SECOND": False, "RECEIVES": False, "STAYS": True} | constants
    program = f"os.environ['MPICOMP_STATUS_AFTER_DEATH'] = '{status}'\n{DEATH_IN_CLOSE}"
    run = jobs.run_tolerant if status else jobs.run_warm  # copies of a process have no status
    job = run(n_ranks, program, DIES_BEFORE=dies_before, **given)
    found, output = job.finish()
    assert found == status, output
    assert "rank 0 died while the ranks closed the communicator" in output
    assert {path.name for path in job.folder.glob("closed-*")} == {f"closed-{rank}" for rank in range(1, n_ranks)}
    assert "not all survivors come" not in output


@pytest.mark.parametrize(("n_ranks", "dies_before"), [(3, 2), (4, 1), (7, 2), (8, 1)])
def test_ranks_that_have_closed_answer_others_after_a_death(jobs: Jobs, n_ranks: int, dies_before: int) -> None:
    close(jobs, n_ranks, dies_before)


@pytest.mark.parametrize("options", [{"ranks_per_node": 2}, {"checksums": True}, {"link": "1gbit"}, {"threads": 2}])
def test_a_death_in_close_ends_it_on_each_kind_of_communicator(jobs: Jobs, options: dict[str, Any]) -> None:
    close(jobs, 3, 2, OPTIONS=options)


def test_a_rank_with_a_message_in_flight_answers(jobs: Jobs) -> None:
    close(jobs, 3, 2, RECEIVES=True)


def test_a_rank_that_ends_with_a_status_answers_before(jobs: Jobs) -> None:
    close(jobs, 3, 2, status=75, STAYS=False)


def test_a_death_in_close_lets_calls_of_another_communicator_go_on(jobs: Jobs) -> None:
    close(jobs, 3, 2, HAS_SECOND=True)
    assert [(jobs.folder / f"sum-{rank}").read_text() for rank in (1, 2)] == ["2.0", "2.0"]


def test_each_survivor_of_a_death_in_close_writes_its_trace(jobs: Jobs) -> None:
    close(jobs, 3, 2, OPTIONS={"trace": str(jobs.folder / "traces")})
    assert len([*(jobs.folder / "traces").glob("*1*")]) == len([*(jobs.folder / "traces").glob("*2*")]) == 1


PENDING = """
from mpi4py import MPI
world, me = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
group = world.Split(me // 2) if PART else world
comm = mpicomp.Communicator(group, on_failure="regroup", timeout=NEVER_S, arrival_timeout=NEVER_S)
if comm.rank == 0:
    message = comm.irecv(np.empty(1), 1)
comm.close()
if BY_HAND:
    MPI.Finalize()
tell(f"ends-{me}")
"""


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_message_in_flight_at_close_lets_the_program_end(jobs: Jobs, part: bool, by_hand: bool) -> None:
    job = jobs.run_tolerant(4, PENDING, PART=part, BY_HAND=by_hand)
    status, output = job.finish()
    assert status == 0, output
    assert len([*job.folder.glob("ends-*")]) == 4


MANY = """
from mpi4py import MPI
import threading
found = []
for place in range(60):
    with mpicomp.Communicator(on_failure="regroup", ranks_per_node=2) as comm:
        comm.nodes
        kept = comm.mpi_comm, *(part.mpi_comm for part in comm.parts)
    for thread in threading.enumerate():
        if thread.name == "mpicomp: farewell":
            thread.join()
    found.append([one == MPI.COMM_NULL for one in kept])
tell(f"freed-{MPI.COMM_WORLD.rank}", all(map(all, found)))
"""


def test_communicators_that_all_ranks_have_closed_are_freed_with_their_nodes(jobs: Jobs) -> None:
    status, output = (job := jobs.run_warm(3, MANY)).finish()
    assert status == 0, output
    assert [job.told(f"freed-{rank}") for rank in range(3)] == ["True"] * 3
