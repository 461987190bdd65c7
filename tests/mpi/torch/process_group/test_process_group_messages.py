"""Messages between two ranks: tags, any source, batches, sizes that differ, and that they wait for no collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collectives.communicator import inbox
from collectives.errors import CollectiveMismatch
from mpicomp.torch.process_group import MPIProcessGroup

pytestmark = pytest.mark.usefixtures("group")
two_ranks = pytest.mark.mpi(min_size=2)


def neighbours() -> tuple[int, int]:
    size, rank = dist.get_world_size(), dist.get_rank()
    return (rank - 1) % size, (rank + 1) % size


@pytest.mark.parametrize("largest", [1 << 30, 64])
def test_a_batch_around_the_ring(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LONGEST_BYTES", largest)
    before, after = neighbours()
    received = torch.empty(10, 8)[:, ::2]
    sent = torch.full((10, 4), float(dist.get_rank())).t().contiguous().t()
    ops = [dist.P2POp(dist.irecv, received, before), dist.P2POp(dist.isend, sent, after)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.eq(before).all()


@two_ranks
def test_tags_match_messages_in_any_order() -> None:
    before, after = neighbours()
    sends = [dist.isend(torch.tensor([tag]), after, tag=tag) for tag in (3, 100_000, 5)]
    for tag in (100_000, 5, 3):
        received = torch.empty(1, dtype=torch.int64)
        dist.recv(received, before, tag=tag)
        assert received.item() == tag
    for send in sends:
        send.wait()


@two_ranks
def test_nothing_is_kept_of_a_tag_that_was_used_once(group: MPIProcessGroup) -> None:
    before, after = neighbours()
    for tag in range(5):
        sent = dist.isend(torch.ones(1), after, tag=tag)
        dist.recv(torch.empty(1), before, tag=tag)
        sent.wait()
    assert not group._messages._receives


@two_ranks
def test_messages_of_one_tag_keep_their_order() -> None:
    before, after = neighbours()
    received = [torch.empty(1, dtype=torch.int64) for _ in range(20)]
    works = [dist.irecv(one, before) for one in received]
    for number in range(20):
        dist.send(torch.tensor([number]), after)
    for work in works:
        work.wait()
    assert [int(one) for one in received] == list(range(20))


@two_ranks
def test_a_receive_from_any_source_tells_the_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=7)
        return
    sources = []
    for _ in range(size - 1):
        received = torch.empty(1, dtype=torch.int64)
        sources.append(dist.recv(received, tag=7))
        assert received.item() == sources[-1]
    assert sorted(sources) == list(range(1, size))


@two_ranks
def test_a_collective_does_not_wait_for_a_receive_begun_before() -> None:
    before, after = neighbours()
    received = torch.empty(1)
    work = dist.irecv(received, before)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.send(torch.ones(1), after)
    work.wait()
    assert total.item() == dist.get_world_size()
    assert received.item() == 1


@two_ranks
@pytest.mark.parametrize(("takes", "sends"), [(5, 3), (3, 5), (300_000, 2), (2, 300_000)])
def test_a_message_of_another_size_is_refused_and_the_group_goes_on(takes: int, sends: int) -> None:
    before, after = neighbours()
    send = dist.isend(torch.zeros(sends), after)

    with pytest.raises(CollectiveMismatch, match=f"takes {4 * takes} bytes, and rank {before} sends {4 * sends}"):
        dist.recv(torch.zeros(takes), before)
    send.wait()
    dist.barrier()


def test_ranks_and_tags_that_do_not_exist() -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    with pytest.raises(ValueError, match=f"there is no rank {size} in this group"):
        group.send([torch.zeros(1)], size, 0)
    with pytest.raises(ValueError, match="the tag -1 does not lie in"):
        group.send([torch.zeros(1)], 0, -1)


def test_a_receive_that_nobody_serves_does_not_keep_the_group_from_ending() -> None:
    work = dist.irecv(torch.empty(1), neighbours()[0])
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="it was closed"):
        work.wait()
