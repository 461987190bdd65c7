"""Sums of arrays on devices by MPI itself, which is handed addresses; of a fake device they are the host's."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays import CUDA, MAKERS
from collectives.arrays.gpu_mpi import verdict
from collectives.arrays.gpu_mpi.verdict import Outcome
from collectives.dense import broadcast_gather, device_sum
from tests.fake_device import FakeArray, FakeDevice, FakeStream
from tests.mpi.lanes import eight_too, few_ranks

N = 20_011


def vector(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal(N).astype(np.float16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Give the device that each rank has."""
    one = FakeDevice(0)
    monkeypatch.setitem(MAKERS, CUDA, lambda index: one)
    return one


@eight_too
@pytest.mark.parametrize("comm", ["ring", "double-tree", "halving-doubling"], indirect=True)
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_bits_are_those_of_the_host_though_ranks_differ(
    direct: bool, comm: Communicator, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third rank has its array in the host's memory, and every other third stages it in any case."""
    monkeypatch.setattr(device_sum, "STAGED_BYTES", 0)
    monkeypatch.setattr(verdict.verdict, "outcome", Outcome(direct and comm.rank % 3 != 1, "was faked"))
    expected = comm.allreduce(vector(comm.rank), "mean")
    x = vector(comm.rank) if comm.rank % 3 == 2 else FakeArray(vector(comm.rank))
    handles = [comm.iallreduce(x, "mean") for _ in range(2)]
    for found in (comm.allreduce(x, "mean"), *(handle.wait() for handle in handles)):
        np.testing.assert_array_equal(getattr(found, "there", found), expected)
    if direct and comm.rank % 3 == 0 and comm.size > 1:
        assert not device.copied


@few_ranks
@pytest.mark.parametrize("comm", ["ring"], indirect=True)
def test_the_thread_that_calls_mpi_has_the_device_for_its_current_one(
    comm: Communicator, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the progress thread sets it: the current device of another thread is the program's business."""
    monkeypatch.setattr(device_sum, "DIRECT_BYTES", 0)
    monkeypatch.setattr(verdict.verdict, "outcome", Outcome(works=True, said="was faked"))
    x = FakeArray(np.ones(N, np.float32))
    assert (comm.allreduce(x).there == comm.size).all()
    assert not device.used_by
    if comm.start_progress_thread():
        assert (comm.iallreduce(x).wait().there == comm.size).all()
        assert len(device.used_by) == (comm.size > 1)
        assert threading.current_thread().name not in device.used_by


@pytest.mark.parametrize("able", [0, 1], ids=["all can", "rank 1 cannot"])
@pytest.mark.parametrize("comm", ["auto"], indirect=True)
def test_a_broadcast_goes_directly_where_all_ranks_can(
    able: int, comm: Communicator, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast_gather, "DIRECT_BYTES", 0)
    monkeypatch.setattr(broadcast_gather, "PIECE_BYTES", 1024)
    monkeypatch.setattr(verdict.verdict, "outcome", Outcome(comm.rank != able or not able, "was faked"))
    x, root = vector(comm.rank), comm.size - 1
    assert comm.broadcast(there := FakeArray(x), root) is there
    np.testing.assert_array_equal(x, vector(root))
    assert len(device.copied) == (comm.size == 1 or (able and comm.size > 1))


@few_ranks
@pytest.mark.parametrize("comm", ["ring"], indirect=True)
def test_a_callback_uses_a_result_that_its_stream_waits_for(comm: Communicator, device: FakeDevice) -> None:
    comm.start_progress_thread()
    ended, found, stream = threading.Event(), list[Any](), FakeStream()

    def use(handle: Any) -> None:
        result = handle.wait(stream)
        stream.reach()
        found.append(result.there.copy())
        ended.set()

    comm.iallreduce(FakeArray(vector(comm.rank)), "max").then(use, stream)
    assert ended.wait(timeout=60)
    np.testing.assert_array_equal(found[0], comm.allreduce(vector(comm.rank), "max"))
