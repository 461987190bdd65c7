"""Works, their futures, and errors that surface in them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.errors import CollectiveMismatch, CollectiveTimeout
from mpicomp.torch.process_group import MPIProcessGroup

pytestmark = pytest.mark.usefixtures("group")
two_ranks = pytest.mark.mpi(min_size=2)


def test_a_work_goes_on_by_itself_and_tells_of_its_end() -> None:
    tensor = torch.ones(100_000)
    work = dist.all_reduce(tensor, async_op=True)
    ended = threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    assert ended.wait(20)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert tensor.eq(dist.get_world_size()).all()


def test_a_future_holds_the_tensors_and_passes_them_on() -> None:
    size = dist.get_world_size()
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() + 1)
    assert torch.equal(halved.wait(), torch.full((3,), size / 2 + 1))
    assert torch.equal(torch.futures.collect_all([future]).wait()[0].value()[0], torch.full((3,), float(size)))


def test_a_callback_may_wait_for_another_call() -> None:
    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    tensor = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again).wait()
    assert tensor.eq(dist.get_world_size() ** 3).all()


def test_callbacks_run_in_the_order_in_which_calls_begin() -> None:
    seen: list[int] = []
    futures = [
        dist.all_reduce(torch.ones(n), async_op=True).get_future().then(lambda _, n=n: seen.append(n))
        for n in (300_000, 1, 40_000, 2, 100_000, 3)
    ]
    torch.futures.wait_all(futures)
    assert seen == [300_000, 1, 40_000, 2, 100_000, 3]


def test_an_error_in_a_callback_is_raised_by_its_future() -> None:
    future = dist.barrier(async_op=True).get_future().then(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        future.wait()


@two_ranks
def test_a_mismatch_surfaces_in_work_and_future_of_every_rank() -> None:
    n = 1 + (dist.get_rank() == 0)
    work = dist.all_reduce(torch.ones(n), async_op=True)
    text = r"the ranks differ in collective call \d+: rank 0: all_reduce \(SUM\) of 2 float32; ranks? 1"
    future = work.get_future()
    for ending in (work.wait, future.wait, future.value, future.then(lambda done: done.value()).wait):
        with pytest.raises(CollectiveMismatch, match=text):
            ending()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), CollectiveMismatch)
    dist.barrier()


@two_ranks
def test_a_wait_has_a_timeout_after_which_the_call_goes_on() -> None:
    rank = dist.get_rank()
    if rank == 0:
        received = torch.zeros(1)
        work = dist.irecv(received, 1)
        with pytest.raises(CollectiveTimeout, match=r"Timed out: the call has not ended after 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        dist.barrier()
        assert work.wait(timedelta(seconds=20))
        assert received.item() == 1
    else:
        dist.barrier()
        if rank == 1:
            dist.send(torch.ones(1), 0)


def test_works_begun_together_end_together(group: MPIProcessGroup) -> None:
    tensors, shared = [torch.ones(2), torch.ones(3)], torch.tensor([float(dist.get_rank())])
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            group.allreduce([tensor])
        group.broadcast(shared, root=0)
    manager.wait()
    assert shared.item() == 0
    assert all(tensor.eq(dist.get_world_size()).all() for tensor in tensors)


def test_no_works_begun_together_have_ended(group: MPIProcessGroup) -> None:
    group._start_coalescing(torch.device("cpu"))
    work = group._end_coalescing(torch.device("cpu"))
    assert work.wait(timedelta(seconds=5))
    assert work.get_future().done()


@two_ranks
def test_an_error_of_a_collective_ends_backward_of_ddp() -> None:
    sub = dist.new_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=sub)
    sub.set_timeout(timedelta(seconds=0.5))
    loss = model(torch.ones(2, 4)).sum()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="not all ranks have come to call"):
            loss.backward()
    dist.barrier()


def test_hundreds_of_works_in_flight_end_in_order_with_their_own_results() -> None:
    tensors = [torch.full((3,), float(number)) for number in range(500)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [number * dist.get_world_size() for number in range(500)]


@pytest.mark.mpi(min_size=2)
def test_many_works_of_two_groups_begun_in_another_order_on_each_rank_all_end() -> None:
    groups = [dist.new_group(), dist.new_group()]
    tensors = [[torch.ones(3) for _ in range(100)] for _ in groups]
    works = []
    for which in (0, 1) if dist.get_rank() else (1, 0):
        works += [dist.all_reduce(one, group=groups[which], async_op=True) for one in tensors[which]]
    for work in works:
        work.wait()
    assert all(one.tolist() == [dist.get_world_size()] * 3 for several in tensors for one in several)
    for group in groups:
        dist.destroy_process_group(group)
