"""Allocation of shared memory, order of starts and calls, and ranks that raise within a step."""

from __future__ import annotations

import gc
import random
import threading
import time
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from collectives import CollectiveTimeout
from mpicomp import Communicator, LocalTopK, PerNode, run_local
from mpicomp.nodes.driver import PerNodeDriver
from mpicomp.nodes.local_sum import MessageSum
from mpicomp.nodes.shared_memory_sum import SharedMemorySum
from tests.exact import gradient

N = 3 * 32_768 + 900


def vector(rank: int, step: int) -> Any:
    return gradient(rank, step, N)


def test_ranks_that_start_methods_at_different_times_send_messages_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank finds out that it shares no memory before it starts the next method, and another one later."""

    def fail(*arguments: object) -> None:
        raise MemoryError("No space left on device")

    monkeypatch.setattr("mpicomp.nodes.shared_memory_sum.share_memory", fail)

    def work(comm: Communicator) -> Any:
        first = PerNode(LocalTopK(50)).start(comm, N)
        if comm.rank % 2:
            time.sleep(0.2)
        handle = first.begin(vector(comm.rank, 0))
        until = time.monotonic() + 0.5 * (comm.rank % 2)
        while time.monotonic() < until:
            handle.poll()
        second = PerNode(LocalTopK(50), "ring").start(comm, N)
        return handle.wait(), second.aggregate(vector(comm.rank, 0))

    for first, second in run_local(4, work, ranks_per_node=2, timeout=10):
        np.testing.assert_array_equal(first, second)


def test_ranks_make_first_steps_on_several_communicators_in_any_order() -> None:
    def work(comm: Communicator) -> None:
        comms, order = [comm, *(comm.split(0) for _ in range(3))], random.Random(comm.rank)
        for _ in range(10):
            methods = dict(enumerate(PerNode(LocalTopK(50)).start(one, 500) for one in comms))
            handles = dict[int, Any]()
            for number in order.sample(range(4), 4):
                handles[number] = methods[number].begin(np.full(500, comm.rank, np.float32))
                time.sleep(order.random() * 0.002)
            for number in order.sample(range(4), 4):
                handles[number].wait()
        for one in comms[1:]:
            one.close()

    run_local(4, work, ranks_per_node=2, timeout=6)


@pytest.mark.parametrize("phase", ["_exchange", "_mean_of_node", "reduce", "gather"])
@pytest.mark.parametrize("local", ["shared", "ring"])
def test_a_rank_that_raises_within_a_step_ends_it_on_all(
    monkeypatch: pytest.MonkeyPatch, phase: str, local: str
) -> None:
    way = MessageSum if local == "ring" else SharedMemorySum
    owner: Any = PerNodeDriver if phase.startswith("_") else way
    right, bad = getattr(owner, phase), set[int]()

    def on_one_rank(*arguments: Any) -> Any:
        if threading.get_ident() in bad:
            raise MemoryError("my own")
        return right(*arguments)

    monkeypatch.setattr(owner, phase, on_one_rank)
    per = 4 if phase == "_mean_of_node" else 2

    def work(comm: Communicator) -> str:
        aggregator = PerNode(LocalTopK(50), local).start(comm, N)
        aggregator.aggregate(vector(comm.rank, 0))
        if comm.rank == 1:
            bad.add(threading.get_ident())

        def make_step() -> None:
            aggregator.aggregate(vector(comm.rank, 1))
            comm.barrier()  # of ranks that were done with the step before

        with pytest.raises((MemoryError, CollectiveTimeout)) as caught:
            make_step()
        return str(caught.value)

    start = time.monotonic()
    texts = run_local(4, work, ranks_per_node=per, timeout=60)
    assert time.monotonic() - start < 20
    assert texts[1] == "my own"
    for rank in (0, 2, 3):
        assert texts[rank].startswith(f"rank {rank} of 4")
        assert "another rank has given up" in texts[rank]


def test_methods_that_are_dropped_leave_neither_memory_nor_requests() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("mpicomp-")

    made, before = list[Any](), mapped()

    def work(comm: Communicator) -> Any:
        counts = []
        for _ in range(3):
            aggregator = PerNode(LocalTopK(50)).start(comm, N)
            aggregator.aggregate(vector(comm.rank, 0))
            made.append(ref(aggregator.driver))
            del aggregator
            gc.collect()
            comm.barrier()
            counts.append([len(one.users._requests) for one in (comm.nodes.local, comm.nodes.across)])
        return counts

    for counts in run_local(4, work, ranks_per_node=2):
        assert counts == [[0, 0]] * 3
    assert not any(one() for one in made)
    assert mapped() == before
