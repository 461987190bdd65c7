"""Optimizers go on where a rank dies in a call that only their first steps make, or the call in which they are made."""

from __future__ import annotations

import pytest

from collectives import RanksLost
from collectives.recovery.fault_tolerance import repeat_after_deaths
from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

TRAINING = """
import torch
from collectives.execution.call import Call
from mpicomp.torch import DistributedOptimizer
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=2, timeout=60)
me, make_call, counts = comm.rank, Call.__init__, {}
def die_in_call(call, *args, **options):
    make_call(call, *args, **options)
    name = call.name().partition("(")[0].partition(" ")[0]
    counts[name] = counts.get(name, 0) + 1
    if (me, name, counts[name]) == WHERE:
        os.kill(os.getpid(), signal.SIGKILL)
Call.__init__ = die_in_call
TOP_K = mpicomp.LocalTopK(rate=10)
if NODES == "read":
    assert comm.nodes.local.size <= 2
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
options = {}
if NODES == "islands":
    options = {"local_steps": 2, "synchronize": "updates", "islands": comm.nodes.local}
optimizer = DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), mpicomp.PerNode(TOP_K) if NODES is True else TOP_K, comm,
    model.named_parameters(), **options,
)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 20), float(me))).square().mean().backward()
    optimizer.step()
if NODES == "islands":
    optimizer.synchronize()
tell(f"weights-{me}", [parameter.sum().item() for parameter in model.parameters()])
comm.close()
"""


@pytest.mark.parametrize(
    ("nodes", "where"),
    [
        (False, (0, "broadcast", 1)),  # of the order in which parameters fill the buckets, which is rank 0's
        (True, (1, "split", 1)),
        (True, (2, "split", 2)),
        ("read", (1, "split", 1)),  # by `comm.nodes`
        ("islands", (2, "allgather_object", 1)),
    ],
)
def test_survivors_repeat_calls_of_the_first_steps(jobs: Jobs, nodes: bool | str, where: tuple[int, str, int]) -> None:
    job = jobs.run_warm(4, TRAINING, NODES=nodes, WHERE=where)
    status, output = job.finish()
    assert status == 0, output
    weights = {job.told(f"weights-{rank}") for rank in range(4) if rank != where[0]}
    assert len(weights) == 1, output


def test_a_call_is_repeated_after_deaths_alone() -> None:
    outcomes = [RanksLost("rank 1 died", (0, 2)), RanksLost("rank 2 died", (0,)), ValueError("another")]

    def make() -> None:
        raise outcomes.pop(0)

    with pytest.raises(ValueError, match="another"):
        repeat_after_deaths(make)
    assert not outcomes
