"""Ranks that die under DistributedDataParallel with a hook: the survivors go on, and PyTorch's calls name the dead."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpicomp
from tests.unit.faults.jobs import JOB_S, Jobs

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(2 * JOB_S)

RANKS, STEPS, BATCH, FEATURES, UNITS = 3, 7, 4, 40, 8
RATE = 4
N = UNITS * FEATURES + UNITS

TRAINING = """
import torch
from mpi4py import MPI
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from collectives import PeerFailure
from mpicomp.torch import ddp_hook, fsdp_hook, register_backend
torch.set_num_threads(1)
me = MPI.COMM_WORLD.rank
tell(f"pid-{me}", os.getpid())

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(FEATURES, UNITS), torch.nn.BatchNorm1d(FEATURES, affine=False)
    def forward(self, inputs):
        self.norm(inputs)  # its buffers change
        return self.linear(inputs)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

register_backend()
dist.init_process_group(BACKEND)
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
torch.manual_seed(0)
net = Net()
refused = []
unused = DistributedDataParallel(net, find_unused_parameters=True)
for make, broken in ((ddp_hook, None), (ddp_hook, unused), (fsdp_hook, net)):
    try:
        make(mpicomp.Dense(), comm, broken)
    except ValueError as error:
        refused.append(str(error))
tell(f"refused-{me}", "\\n".join(refused))
model = DistributedDataParallel(net)
state, hook = ddp_hook(mpicomp.LocalTopK(rate=RATE), comm, model)
model.register_comm_hook(state, hook)
np.save(FOLDER / f"first-{me}.npy", torch.cat([one.detach().view(-1) for one in net.linear.parameters()]).numpy())
optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
try:
    for step in range(STEPS):
        inputs = torch.from_numpy(np.random.default_rng([me, step]).integers(-9, 9, (BATCH, FEATURES)))
        if DEATHS.get(me) == (step, "forward"):
            die()
        loss = model(inputs.float()).sum()
        if DEATHS.get(me) == (step, "backward"):
            net.linear.weight.register_hook(lambda _: die())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except PeerFailure as error:
    tell(f"error-{me}", error)
    os._exit(1)
dense = state.iterations - state.aggregators[0].step
norm = net.norm
weights = [one.detach().view(-1) for one in net.linear.parameters()]
last = torch.cat([*weights, norm.running_mean, norm.running_var])
np.save(FOLDER / f"last-{me}.npy", last.numpy())
tell(f"state-{me}", f"{comm.members} {dense} {state.buckets}")
if BACKEND == "mpicomp":
    try:
        dist.all_reduce(torch.ones(2))
    except PeerFailure as error:
        tell(f"error-{me}", error)
    dist.destroy_process_group()
comm.close()
"""


def expected(first: Any, n_dense: int, buckets: list[list[str]], deaths: dict[int, int]) -> Any:
    """Return weights and bias of threads that make the same steps; gradients do not depend on the model."""

    def gradient(rank: int, step: int) -> dict[str, Any]:
        inputs = np.random.default_rng([rank, step]).integers(-9, 9, (BATCH, FEATURES)).astype(np.float32)
        weight = np.broadcast_to(inputs.sum(0), (UNITS, FEATURES)).ravel()
        return {"linear.weight": weight, "linear.bias": np.full(UNITS, BATCH, np.float32)}

    means: list[Any] = []
    states: dict[int, Any] = {}
    for start, end in zip([0, *sorted(deaths.values())], [*sorted(deaths.values()), STEPS], strict=True):
        ranks = [rank for rank in range(RANKS) if deaths.get(rank, STEPS) > start]

        def train(
            comm: Any, ranks: list[int] = ranks, states: dict[int, Any] = states, start: int = start, end: int = end
        ) -> Any:
            me = ranks[comm.rank]
            dense, top_k = mpicomp.Dense().start(comm, N), mpicomp.LocalTopK(rate=RATE).start(comm, N)
            if me in states:
                top_k.load_state_dict(states[me])
            found = []
            for step in range(start, end):
                own = gradient(me, step)
                vector = np.concatenate([own[name] for name in buckets[0]])
                found.append((dense if step < n_dense else top_k).aggregate(vector).copy())
            return me, found, top_k.state_dict()

        ended = mpicomp.run_local(len(ranks), train)
        states = {me: state for me, _, state in ended}
        means += ended[0][1]
    model = {"linear.weight": first[: UNITS * FEATURES].copy(), "linear.bias": first[UNITS * FEATURES :].copy()}
    for mean in means:
        at = 0
        for name in buckets[0]:
            model[name] -= np.float32(0.125) * mean[at : at + model[name].size]
            at += model[name].size
    return np.concatenate([*model.values()])


@pytest.mark.parametrize(
    ("backend", "dead", "place"),
    [
        ("mpicomp", 0, "backward"),  # the rank whose buffers the others take
        ("gloo", 1, "forward"),
    ],
)
def test_a_ddp_hook_goes_on_with_the_survivors_to_the_bit(jobs: Jobs, backend: str, dead: int, place: str) -> None:
    deaths = {dead: 4}
    job = jobs.run_tolerant(
        RANKS,
        TRAINING,
        BACKEND=backend,
        DEATHS={rank: (step, place) for rank, step in deaths.items()},
        **{"RATE": RATE, "STEPS": STEPS, "BATCH": BATCH, "FEATURES": FEATURES, "UNITS": UNITS},
    )
    _, output = job.finish()
    alive = [rank for rank in range(RANKS) if rank != dead]
    states = {job.told(f"state-{rank}") for rank in alive}
    assert len(states) == 1, output
    found = re.fullmatch(r"(\(.*?\)) (\d) (.*)", states.pop())
    assert found
    assert found[1] == str(tuple(alive))
    last = [np.load(job.folder / f"last-{rank}.npy") for rank in alive]
    model = expected(np.load(job.folder / f"first-{alive[0]}.npy"), int(found[2]), _lists(found[3]), deaths)
    for one in last:
        np.testing.assert_array_equal(one[:N], model)
    # the last step changes running statistics by each rank's own inputs, from equal ones
    inputs = [np.random.default_rng([rank, STEPS - 1]).integers(-9, 9, (BATCH, FEATURES)) for rank in alive]
    before = [one[N : N + FEATURES] - 0.1 * own.mean(0) for one, own in zip(last, inputs, strict=True)]
    np.testing.assert_allclose(*before, atol=1e-5)
    for rank in alive:
        without_model, unused, sharded = job.told(f"refused-{rank}").splitlines()
        assert "pass the model" in without_model
        assert "find_unused_parameters=True" in unused
        assert "FSDP cannot go on without the shards of a dead rank" in sharded
        if backend == "mpicomp":
            error = job.told(f"error-{rank}")
            assert re.match(rf"rank {rank} of {RANKS}: rank {dead} died", error), error
            assert "start again from the last checkpoint" in error


def _lists(text: str) -> list[list[str]]:
    return [[*re.findall(r"'([^']+)'", text)]]


def test_a_death_before_ddp_has_formed_its_buckets_ends_all_survivors_with_the_cure(jobs: Jobs) -> None:
    job = jobs.run_tolerant(
        RANKS,
        TRAINING,
        BACKEND="mpicomp",
        DEATHS={2: (0, "backward")},
        **{"RATE": RATE, "STEPS": STEPS, "BATCH": BATCH, "FEATURES": FEATURES, "UNITS": UNITS},
    )
    status, output = job.finish()
    assert status != 0
    for rank in (0, 1):
        error = job.told(f"error-{rank}")
        assert "rank 2 died" in error, output
        assert "start again from the last checkpoint" in error
