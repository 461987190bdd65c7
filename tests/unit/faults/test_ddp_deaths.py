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
dist.init_process_group("gloo")
groups = [dist.group.WORLD, dist.new_group(backend="mpicomp")]
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
nets = []
for group in groups:
    torch.manual_seed(0)
    nets.append(Net())
refused = []
unused = DistributedDataParallel(nets[0], find_unused_parameters=True)
for make, broken in ((ddp_hook, None), (ddp_hook, unused), (fsdp_hook, nets[0])):
    try:
        make(mpicomp.Dense(), comm, broken)
    except ValueError as error:
        refused.append(str(error))
tell(f"refused-{me}", "\\n".join(refused))
models, states = [], []
for net, group in zip(nets, groups):
    models.append(DistributedDataParallel(net, process_group=group))
    state, hook = ddp_hook(mpicomp.LocalTopK(rate=RATE), comm, models[-1])
    models[-1].register_comm_hook(state, hook)
    states.append(state)
np.save(FOLDER / f"first-{me}.npy", torch.cat([one.detach().view(-1) for one in nets[0].linear.parameters()]).numpy())
optimizer = torch.optim.SGD([one for net in nets for one in net.parameters()], lr=0.125)
try:
    for step in range(STEPS):
        inputs = torch.from_numpy(np.random.default_rng([me, step]).integers(-9, 9, (BATCH, FEATURES)))
        if (me, step) == DEATH:  # between the models' parts of a step, and within the second one
            nets[1].linear.weight.register_hook(lambda _: die())
        optimizer.zero_grad()
        for model in models:
            model(inputs.float()).sum().backward()
        optimizer.step()
except PeerFailure as error:
    tell(f"error-{me}", error)
    os._exit(1)
for i, (net, state) in enumerate(zip(nets, states)):
    weights = [one.detach().view(-1) for one in net.linear.parameters()]
    np.save(FOLDER / f"last-{i}-{me}.npy", torch.cat([*weights, net.norm.running_mean]).numpy())
    tell(f"state-{i}-{me}", f"{comm.members} {state.iterations - state.aggregators[0].step} {state.buckets}")
try:
    dist.all_reduce(torch.ones(2), group=groups[1])
except PeerFailure as error:
    tell(f"error-{me}", error)
dist.destroy_process_group()
comm.close()
"""
OPTIONS = {"RATE": RATE, "STEPS": STEPS, "BATCH": BATCH, "FEATURES": FEATURES, "UNITS": UNITS}


def expected(first: Any, n_dense: int, names: list[str], deaths: dict[int, int]) -> Any:
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
                vector = np.concatenate([own[name] for name in names])
                found.append((dense if step < n_dense else top_k).aggregate(vector).copy())
            return me, found, top_k.state_dict()

        ended = mpicomp.run_local(len(ranks), train)
        states = {me: state for me, _, state in ended}
        means += ended[0][1]
    model = {"linear.weight": first[: UNITS * FEATURES].copy(), "linear.bias": first[UNITS * FEATURES :].copy()}
    for mean in means:
        at = 0
        for name in names:
            model[name] -= np.float32(0.125) * mean[at : at + model[name].size]
            at += model[name].size
    return np.concatenate([*model.values()])


def test_a_ddp_hook_goes_on_with_the_survivors_to_the_bit(jobs: Jobs) -> None:
    dead, step = 0, 4  # the rank whose buffers the others take
    job = jobs.run_warm(RANKS, TRAINING, DEATH=(dead, step), **OPTIONS)
    _, output = job.finish()
    alive = [rank for rank in range(RANKS) if rank != dead]
    first = job.load(f"first-{alive[0]}")
    for i, first_step_without in enumerate((step + 1, step)):  # over Gloo and over mpicomp
        states = {job.told(f"state-{i}-{rank}") for rank in alive}
        assert len(states) == 1, output
        found = re.fullmatch(r"(\(.*?\)) (\d) (.*)", states.pop())
        assert found
        assert found[1] == str(tuple(alive))
        model = expected(first, int(found[2]), re.findall(r"'([^']+)'", found[3]), {dead: first_step_without})
        last = [job.load(f"last-{i}-{rank}") for rank in alive]
        for one in last:
            np.testing.assert_array_equal(one[:N], model)
        # the last step changes running means by each rank's own inputs, from equal ones
        inputs = [np.random.default_rng([rank, STEPS - 1]).integers(-9, 9, (BATCH, FEATURES)) for rank in alive]
        before = [one[N:] - 0.1 * own.mean(0) for one, own in zip(last, inputs, strict=True)]
        np.testing.assert_allclose(*before, atol=1e-5)
    for rank in alive:
        without_model, unused, sharded = job.told(f"refused-{rank}").splitlines()
        assert "pass the model" in without_model
        assert "find_unused_parameters=True" in unused
        assert "FSDP cannot go on without the shards of a dead rank" in sharded
        error = job.told(f"error-{rank}")
        assert re.match(rf"rank {rank} of {RANKS}: rank {dead} died", error), error
        assert "start again from the last checkpoint" in error


def test_a_death_before_ddp_has_formed_its_buckets_ends_the_survivor_with_the_cure(jobs: Jobs) -> None:
    job = jobs.run_warm(2, TRAINING, DEATH=(1, 0), **OPTIONS)
    status, output = job.finish()
    assert status != 0
    error = job.told("error-0")
    assert "rank 1 died in iteration 1, and DistributedDataParallel forms its buckets" in error, output
    assert "start again from the last checkpoint" in error
