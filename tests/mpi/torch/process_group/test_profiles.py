"""Profilers of PyTorch show our calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from collectives import Communicator
from mpicomp import Marsit
from tests.mpi.torch.training import batch, wrapped

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.mpi(max_size=2)]


def test_calls_are_events_that_last_until_the_call_has_ended() -> None:
    x, rank, size = torch.ones(10), dist.get_rank(), dist.get_world_size()
    with profile() as profiler:
        dist.all_reduce(x)
        work = dist.broadcast(x, 0, async_op=True)
        dist.barrier()
        work.wait()
        if size > 1:
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    events = {event.name: event for event in profiler.function_events if event.name.startswith("mpicomp:")}
    message = {"mpicomp:send" if rank == 0 else "mpicomp:receive"} if size > 1 else set()
    assert events.keys() == {"mpicomp:all_reduce", "mpicomp:broadcast", "mpicomp:barrier", *message}
    broadcast, barrier = (events[f"mpicomp:{name}"].time_range for name in ("broadcast", "barrier"))
    assert broadcast.start < barrier.start < broadcast.end  # it ends after its begin has returned


@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_of_an_optimizer_are_events_by_the_name_of_their_method(overlap: bool, comm: Communicator) -> None:
    model, optimizer = wrapped(Marsit(3), comm, synchronize="gradients", overlap=overlap)
    for step in range(2):
        with profile() as profiler:
            model(batch(step)[0]).square().sum().backward()
            optimizer.step()
    events = [event for event in profiler.function_events if event.name == "mpicomp:Marsit"]
    assert len(events) == len(optimizer.aggregators) > 1


def test_a_call_that_fails_ends_its_event() -> None:
    with profile() as profiler, pytest.raises(TypeError, match="not supported"):
        dist.all_reduce(torch.ones(1, dtype=torch.float8_e4m3fn))
    assert not [event for event in profiler.function_events if event.name.startswith("mpicomp:")]
