"""`torch.compile` around calls of the process group, and around DistributedDataParallel on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from mpicomp import Marsit
from mpicomp.torch import ddp_hook
from tests.mpi.lanes import two_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks

pytestmark = [pytest.mark.usefixtures("group"), two_ranks]
compiled = partial(torch.compile, backend="aot_eager")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(comm: Communicator, compile_: Callable[[Any], Any], hooked: bool, whole: bool) -> nn.Module:
    """Train a model, where either forward is compiled, or the whole of forward and backward."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    if hooked:
        wrapped.register_comm_hook(*ddp_hook(Marsit(3), comm, wrapped))
    forward = wrapped if whole else compile_(wrapped)

    def backward(inputs: Tensor) -> None:
        forward(inputs).square().sum().mul(0.05).backward()

    run = compile_(backward) if whole else backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        run(batch(1000 * comm.rank + step)[0])
        optimizer.step()
    return model


@pytest.mark.parametrize(("hooked", "whole"), [(False, False), (True, False), (True, True)])
def test_a_compiled_ddp_trains_the_same_model(hooked: bool, whole: bool, comm: Communicator) -> None:
    models = [train(comm, one, hooked, whole) for one in (lambda one: one, compiled)]
    assert torch.equal(*map(parameters_of, models))
    assert same_on_all_ranks(models[1], comm)


def test_calls_in_a_compiled_function() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(12.0).view(4, 3) * (rank + 1)

    def calls() -> list[Tensor]:
        total, root, received = x * 2, x * 3, torch.empty_like(x)
        work = dist.all_reduce(total, async_op=True)
        sums = x + 1
        dist.broadcast(root, size - 1)
        ring = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
        for one in dist.batch_isend_irecv(ring):
            one.wait()
        work.wait()
        future = dist.all_reduce(sums, async_op=True).get_future()
        dist.barrier()
        return [total + 1, root + 1, received + 1, future.wait()[0] + 1]

    for one, other in zip(compiled(calls)(), calls(), strict=True):
        assert torch.equal(one, other)
