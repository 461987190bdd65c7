"""Profilers of PyTorch show our calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.autograd.profiler import profile, record_function

from collectives import Communicator
from mpicomp import Marsit
from tests.mpi.torch.training import batch, wrapped

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.mpi(max_size=2)]


def test_calls_are_events() -> None:
    x, rank, size = torch.ones(10), dist.get_rank(), dist.get_world_size()
    with profile() as profiler:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.barrier()
        if size > 1:
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    events = {event.name for event in profiler.function_events if event.name.startswith("mpicomp:")}
    message = {"mpicomp:send" if rank == 0 else "mpicomp:receive"} if size > 1 else set()
    assert events == {"mpicomp:all_reduce", "mpicomp:broadcast", "mpicomp:barrier", *message}


@pytest.mark.mpi(min_size=2)
def test_an_event_lasts_until_its_call_has_ended(mpi_comm: MPI.Intracomm) -> None:
    x = torch.ones(10)
    with profile() as profiler:
        if mpi_comm.rank:  # the call cannot end before this rank makes it
            mpi_comm.Barrier()
        work = dist.all_reduce(x, async_op=True)
        if not mpi_comm.rank:
            with record_function("begun"):
                mpi_comm.Barrier()
        work.wait()
    events = {event.name: event.time_range for event in profiler.function_events}
    if not mpi_comm.rank:
        assert events["begun"].start < events["mpicomp:all_reduce"].end


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
