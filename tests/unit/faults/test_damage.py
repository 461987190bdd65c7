"""A damaged message raises one error on all ranks, also after a death, and though the rank that finds it ends soon."""

from __future__ import annotations

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs, jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)
__all__ = ["jobs"]

# Rank 2 finds the damage. The others, which wait for it in the call, go on only after a while: by then rank 2 might be
# dead, and the others regrouping.
PROGRAM = """
from mpi4py import MPI
from apps.faults import Injector, corrupt_at
from collectives import DamagedMessage

rank = MPI.COMM_WORLD.rank
faults = Injector([corrupt_at(0, 2, "before-call")], rank)
with faults.installed():
    comm = mpicomp.Communicator(faults.watch(MPI.COMM_WORLD), timeout=60, on_failure="regroup", checksums=True)
    try:
        for step in range(5):
            faults.begin(step)
            if step == 2 and rank == 2:
                time.sleep(0.1)
            elif step == 2:  # as on busy cores
                signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(PAUSE_S))
                signal.setitimer(signal.ITIMER_REAL, 0.05)
            comm.allreduce(np.ones(1000))
            faults.end()
        tell(f"ended-{rank}", f"all steps, {comm.size} ranks")
    except DamagedMessage as error:
        tell(f"ended-{rank}", type(error).__name__)
    os._exit(0)
"""


def test_all_ranks_raise_the_error_of_a_damaged_message_before_one_of_them_ends(jobs: Jobs) -> None:
    job = jobs.run_warm(3, PROGRAM, PAUSE_S=2.0)
    assert [job.told(f"ended-{rank}") for rank in range(3)] == ["DamagedMessage"] * 3, job.output


# Rank 0 dies, and the last one may take its place. Rank FLIPS flips a bit of the first message of a kind after that.
REGROUPING = """
from mpi4py import MPI
from collectives import DamagedMessage

class Flipped:
    def __init__(self, request, memory):
        self.request, self.memory = request, memory
    def Test(self):
        done = self.request.Test()
        if done and self.memory is not None:
            self.memory.reshape(-1).view(np.uint8)[3] ^= 64
            self.memory = None
            tell("flipped")
        return done

class Wire(MPI.Intracomm):
    awaits, flips = "", KIND if MPI.COMM_WORLD.rank == FLIPS else ""
    def __new__(cls, comm):
        return super().__new__(cls, comm)
    def damaged(self, kind, request, buffer):
        memory = buffer if isinstance(buffer, np.ndarray) else buffer[0]
        if kind != Wire.awaits or memory.nbytes < 4:
            return request
        Wire.awaits = ""
        return Flipped(request, memory)
    def Dup(self):
        return Wire(MPI.Intracomm(self).Dup())
    def Split(self, color=0, key=0):
        return Wire(MPI.Intracomm(self).Split(color, key))
    def Shrink(self):
        Wire.awaits, Wire.flips = Wire.flips, ""
        return Wire(MPI.Intracomm(self).Shrink())
    def Irecv(self, buffer, source, tag):
        return self.damaged("state", super().Irecv(buffer, source, tag), buffer)
    def Iallgather(self, mine, all):
        return self.damaged("lengths", super().Iallgather(mine, all), all)
    def Iallgatherv(self, mine, all):
        return self.damaged("reports", super().Iallgatherv(mine, all), all)

me = MPI.COMM_WORLD.rank
state = {"step": 0, "model": np.zeros(1000)}
options = {"on_failure": "regroup", "spares": SPARES, "checksums": True, "timeout": 20, "arrival_timeout": 40}
comm = mpicomp.Communicator(Wire(MPI.COMM_WORLD), **options)
try:
    while state["step"] < 100:
        comm.admit(lambda: state, state.update)
        if me == 0 and state["step"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        state["model"] = state["model"] + comm.allreduce(np.ones(1000), "mean")
        state["step"] += 1
        time.sleep(0.1 * (SPARES and state["step"] > 2))
    tell(f"ended-{me}", "all steps")
except DamagedMessage as error:
    tell(f"ended-{me}", error)
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["lengths", "reports"])
def test_damage_while_survivors_regroup_ends_all_of_them(jobs: Jobs, kind: str) -> None:
    job = jobs.run_warm(3, REGROUPING, SPARES=0, KIND=kind, FLIPS=2)
    texts = [job.told(f"ended-{rank}") for rank in (1, 2)]
    assert texts[0] == texts[1], job.output
    assert texts[0].startswith("while the survivors regrouped: rank 1 of 2: a message of")


def test_damage_to_the_state_of_a_newcomer_ends_all_ranks(jobs: Jobs) -> None:
    job = jobs.run_warm(3, REGROUPING, SPARES=1, KIND="state", FLIPS=2)
    texts = [job.told(f"ended-{rank}") for rank in (1, 2)]
    assert texts[0] == texts[1], job.output
    assert texts[0].startswith("admit(), with the ranks that wait: rank 1 of 2: a message of")
