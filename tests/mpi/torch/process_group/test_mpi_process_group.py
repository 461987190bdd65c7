"""Making, splitting, timing out, giving up and ending groups."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import HashStore

from collectives import Communicator
from collectives.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorClosed
from mpicomp.torch import register_backend
from mpicomp.torch.process_group import MPIProcessGroup, registration
from tests.mpi.lanes import TIMEOUT_S

two_ranks = pytest.mark.mpi(min_size=2)


def total(group: Any = None) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def test_ranks_and_store_come_from_mpi(group: dist.ProcessGroup) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert dist.get_backend() == group.name() == "mpicomp"
    store = group.get_group_store()
    store.set(f"said {dist.get_rank()}", "yes")
    dist.barrier()
    assert store.check([f"said {rank}" for rank in range(dist.get_world_size())])
    dist.barrier()  # rank 0 serves the store


@pytest.mark.usefixtures("group")
def test_the_store_listens_on_loopback_alone_if_all_ranks_are_on_one_machine() -> None:
    store: Any = registration._served
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))  # is reached where a store listens on all interfaces
    dist.barrier()


def test_the_store_listens_on_the_first_address_that_all_ranks_reach(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "one_node", False)
    monkeypatch.setattr(registration, "_own_addresses", lambda: ["240.0.0.1", "127.0.0.2", "127.0.0.1"])
    host, port, listening = registration._meeting_point(comm)
    assert host == "127.0.0.2"
    assert (listening is not None) == (comm.rank == 0)
    if listening is not None:
        assert listening.getsockname() == (host, port)
        listening.close()
    monkeypatch.setattr(registration, "_own_addresses", lambda: ["240.0.0.1"])
    with pytest.raises(
        ConnectionError, match=r"not all ranks reach the store of rank 0 at one of 240.0.0.1: set MASTER"
    ):
        registration._meeting_point(comm)


@pytest.mark.usefixtures("group")
def test_a_group_can_be_made_again() -> None:
    dist.destroy_process_group()
    dist.init_process_group("mpicomp", init_method="mpicomp://")
    assert total() == dist.get_world_size()


def test_variables_of_a_launcher_are_taken(mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend()
    size = mpi_comm.size
    turned = (mpi_comm.rank + 1) % size  # ranks need not be MPI's
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if turned == 0 else None
    port = mpi_comm.bcast(server.port if server else None, size - 1)
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", port), ("RANK", turned), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # the server runs already
    dist.init_process_group("mpicomp", timeout=timedelta(seconds=TIMEOUT_S))
    assert dist.get_rank() == turned
    shared = [turned]
    dist.broadcast_object_list(shared, size - 1)
    assert shared == [size - 1]
    dist.destroy_process_group()
    mpi_comm.Barrier()


@two_ranks
def test_ranks_of_the_environment_that_are_not_each_ones_own_are_refused(
    mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_backend()
    monkeypatch.setattr("mpicomp.torch.process_group.registration._served", None)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=rf"rank {mpi_comm.rank} of {mpi_comm.size}: RANK is 0, 0.*: leave RANK unset"):
        dist.init_process_group("mpicomp", timeout=timedelta(seconds=TIMEOUT_S / 4))
    assert not dist.is_initialized()


def test_more_ranks_than_mpi_has_started_are_refused(mpi_comm: MPI.Intracomm) -> None:
    register_backend()
    with pytest.raises(ValueError, match=f"MPI has started {mpi_comm.size} ranks? and not 99: start the program by"):
        dist.init_process_group("mpicomp", world_size=99, rank=mpi_comm.rank)
    assert not dist.is_initialized()


def test_registering_twice_does_nothing_and_another_backend_of_the_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_backend()
    register_backend()
    plugin = dist.Backend._plugins["MPICOMP"]
    assert plugin.creator_fn is registration._create
    monkeypatch.setitem(dist.Backend._plugins, "MPICOMP", plugin._replace(creator_fn=print))
    with pytest.raises(RuntimeError, match="another backend is registered as 'mpicomp'"):
        register_backend()


def test_an_mpi_without_threads_is_refused_with_the_cure(
    mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.progress.thread.MPI.Query_thread", lambda: MPI.THREAD_SERIALIZED)
    register_backend()
    with pytest.raises(RuntimeError, match=r"needs MPI_THREAD_MULTIPLE.*leave mpi4py.rc.thread_level at 'multiple'"):
        dist.init_process_group("mpicomp")
    mpi_comm.Barrier()


@pytest.mark.usefixtures("group")
def test_sub_groups_overlap() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(range(first, size)) for first in range(size)]
    for first, group in enumerate(groups):
        if rank >= first:
            assert total(group) == size - first
            assert dist.get_rank(group) == rank - first
    last = dist.new_group([size - 1])
    dist.destroy_process_group(groups[0])
    assert total() == size
    if rank == size - 1:
        assert total(last) == 1


@pytest.mark.usefixtures("group")
def test_collectives_of_two_groups_are_in_flight_at_once() -> None:
    other = dist.new_group()
    tensors = [torch.ones(50_000) for _ in range(8)]
    order = tensors if dist.get_rank() % 2 else tensors[::-1]  # of the two groups, not within one
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for group in ((None, other) if dist.get_rank() % 2 else (other, None))
        for tensor in order
        if any(tensor is one for one in (tensors[:4] if group is None else tensors[4:]))
    ]
    for work in works:
        work.wait()
    assert all(tensor.eq(dist.get_world_size()).all() for tensor in tensors)


def test_a_group_is_split(group: MPIProcessGroup) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    evens, odds = list(range(0, size, 2))[::-1], list(range(1, size, 2))
    mine = evens if rank % 2 == 0 else odds
    part = group.split_group(mine)
    assert part is not None
    assert (part.size(), part.rank()) == (len(mine), mine.index(rank))
    tensor = torch.ones(1)
    part.allreduce(tensor).wait()
    assert tensor.item() == len(mine)
    part.shutdown()
    assert group.split_group([0]) is None or rank == 0


def test_a_group_of_ranks_that_are_none_is_refused_at_once(group: MPIProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    told = rf"rank {rank} of {size}, split_group: .*ranks from 0 to {size - 1}, each once"
    for ranks in ([rank, size], [rank, -1], [rank, rank], []):
        with pytest.raises(ValueError, match=told):
            group.split_group(ranks)


def test_a_group_may_be_shut_down_twice(group: MPIProcessGroup) -> None:
    part = group.split_group(range(group.size()))
    assert part is not None
    for _ in range(2):
        part.shutdown()


@two_ranks
@pytest.mark.usefixtures("group")
def test_a_rank_that_makes_no_group_is_named() -> None:
    store = HashStore()
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeout, match=r"not all ranks make this process group .* nothing from rank 1 "):
            MPIProcessGroup(store, 0, 2, timedelta(seconds=0.2), "alone")


@two_ranks
@pytest.mark.usefixtures("group")
def test_a_missing_rank_is_named_after_the_timeout_of_the_group() -> None:
    size = dist.get_world_size()
    slow = dist.new_group(timeout=timedelta(seconds=0.5))
    if dist.get_rank() < size - 1:
        with pytest.raises(CollectiveTimeout, match=rf"no answer from rank {size - 1}"):
            dist.barrier(slow)
        with pytest.raises(CommunicatorClosed, match="an earlier call failed"):
            dist.barrier(slow)
    dist.barrier()


@two_ranks
@pytest.mark.usefixtures("group")
def test_a_call_and_a_group_can_have_timeouts_of_their_own() -> None:
    groups, limit = [dist.new_group() for _ in range(2)], timedelta(seconds=0.3)
    calls = partial(dist.barrier, groups[0], timeout=limit), partial(groups[1].monitored_barrier, limit)
    if dist.get_rank() == 0:
        for call in calls:
            start = time.perf_counter()
            with pytest.raises(CollectiveTimeout, match="not all ranks have come to call 1, barrier"):
                call()
            assert time.perf_counter() - start < TIMEOUT_S / 2
    part = dist.new_group()
    if dist.get_rank() == 0:
        part.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(torch.ones(1), group=part)
    dist.barrier()


@two_ranks
def test_an_aborted_group_ends_calls_in_flight_on_all_ranks(group: MPIProcessGroup) -> None:
    other = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.barrier(other, async_op=True)
        received = dist.irecv(torch.empty(1), 1, group=other)
        time.sleep(0.1)
        other.abort()
        for one in (work, received):
            with pytest.raises(CommunicatorClosed, match="the process group was aborted"):
                one.wait()
        dist.barrier(async_op=True).wait(timedelta(seconds=TIMEOUT_S))
    else:
        dist.barrier()
        with pytest.raises((CollectiveTimeout, CommunicatorClosed)):
            dist.barrier(other)


def test_destroying_a_group_waits_for_what_was_dropped(group: MPIProcessGroup) -> None:
    tensor = torch.ones(200_000)
    dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    assert tensor.eq(MPI.COMM_WORLD.size).all()


@two_ranks
def test_a_rank_that_ends_a_group_while_others_use_it_is_not_waited_for_when_these_end_it(
    group: MPIProcessGroup, mpi_comm: MPI.Intracomm
) -> None:
    start = time.perf_counter()
    if group.rank() == 0:
        group.shutdown()  # which logs the mismatch: other groups are to end too
    else:
        with pytest.raises(CollectiveMismatch, match=r"rank 0: close\(\); rank"):
            dist.barrier()
        group.shutdown()
    assert time.perf_counter() - start < TIMEOUT_S / 2
    mpi_comm.Barrier()


def test_a_program_finds_the_variables_of_torchrun(mpi_comm: MPI.Intracomm) -> None:
    found = [int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert [*found[:2], found[3]] == [mpi_comm.rank, mpi_comm.size, mpi_comm.size]
    assert sorted(mpi_comm.allgather(found[2])) == [*range(mpi_comm.size)]  # Open MPI may number them in another order
    assert "MASTER_ADDR" not in os.environ


def test_an_address_alone_does_not_keep_ranks_from_meeting_over_mpi(
    mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")  # where nobody serves a store
    monkeypatch.setenv("MASTER_PORT", "1")
    dist.init_process_group("mpicomp", timeout=timedelta(seconds=TIMEOUT_S))
    assert total() == mpi_comm.size
    dist.destroy_process_group()


def test_a_number_of_ranks_that_contradicts_mpi_is_refused_when_the_backend_is_registered(
    mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "99")
    with pytest.raises(ValueError, match=f"WORLD_SIZE is 99, and MPI has started {mpi_comm.size} rank"):
        register_backend()


@two_ranks
@pytest.mark.usefixtures("group")
def test_a_monitored_barrier_names_the_ranks_that_do_not_come() -> None:
    dist.monitored_barrier()
    group, size = dist.new_group(), dist.get_world_size()
    if dist.get_rank() < size - 1:
        with pytest.raises(
            CollectiveTimeout, match=rf"not all ranks have come to .*barrier.*no answer from rank {size - 1}"
        ):
            dist.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()


@pytest.mark.filterwarnings("ignore:Running monitored_barrier on global rank")  # of ranks that are no members
@pytest.mark.usefixtures("group")
def test_a_monitored_barrier_of_gloo_stays_gloos() -> None:
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo, timedelta(seconds=TIMEOUT_S))
    nowhere = dist.new_group([0], backend="gloo")
    dist.monitored_barrier(nowhere)
    assert dist.get_backend(gloo) == "gloo"
    assert dist.get_rank(nowhere) == (0 if dist.get_rank() == 0 else -1)


@pytest.mark.usefixtures("group")
def test_a_group_counts_the_collectives_that_were_begun() -> None:
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 2
