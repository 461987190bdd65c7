"""Arrays on devices travel through the host's memory, also beside arrays that are there; errors name the device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, CollectiveTimeout, Communicator, Ring, arrays
from collectives.arrays import Landed
from collectives.arrays.device_lookup import ROCM
from collectives.execution.call import Call
from collectives.threads.run_local import run_local
from mpicomp import Dense, Marsit
from mpicomp.algorithms import ALGORITHMS
from tests.fake_device import FakeArray, FakeDevice, order_of_test

N = 700


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeDevice]:
    """Give the fake devices, which are made on their first use."""
    known: dict[int, FakeDevice] = {}
    monkeypatch.setitem(
        arrays.MAKERS, arrays.CUDA, lambda index: known.setdefault(index, FakeDevice(index, order_of_test()))
    )
    return known


def vector(rank: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(rank).standard_normal(N).astype(dtype)


def on_device(comm: Communicator, array: Any, ranks: tuple[int, ...] = (0,)) -> Any:
    """Put an array on this rank's device; on the other ranks it stays in the host's memory."""
    return FakeArray(array, index=comm.rank) if comm.rank in ranks else array


def read(array: Any) -> Any:
    return array.there if isinstance(array, FakeArray) else array


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("size", [1, 3])
def test_dense_sums_of_ranks_of_which_some_have_devices_have_the_same_bits(size: int, ranks: tuple[int, ...]) -> None:
    def take(comm: Communicator) -> list[Any]:
        x = on_device(comm, vector(comm.rank), ranks)
        out = on_device(comm, np.zeros(N, np.float32), ranks)
        results = [comm.allreduce(x), comm.allreduce(x, "mean", out), comm.iallreduce(x, "max").wait()]
        assert results[1] is out
        assert type(results[0]) is type(x)
        comm.allreduce(x, out=x)
        return [read(one) for one in (*results, x)]

    plain = run_local(
        size, lambda comm: [comm.allreduce(vector(comm.rank), op) for op in ("sum", "mean", "max")], Ring()
    )
    for found in run_local(size, take, Ring()):
        for one, expected in zip(found, [*plain[0], plain[0][0]], strict=True):
            np.testing.assert_array_equal(one, expected)


def test_broadcast_allgather_send_and_recv_take_arrays_of_devices() -> None:
    def take(comm: Communicator) -> None:
        x = on_device(comm, vector(comm.rank), (0, 1))
        rows = read(comm.allgather(x))
        np.testing.assert_array_equal(rows, np.concatenate([vector(rank) for rank in range(3)]))
        if comm.rank == 0:
            handles = [comm.isend(x, 2), comm.isend(np.arange(5.0), 2)]  # of one tag, so they arrive in this order
            for handle in handles:
                handle.wait()
        elif comm.rank == 2:
            np.testing.assert_array_equal(comm.recv(np.empty(N, np.float32), 0), vector(0))
            assert (comm.recv(np.empty(5), 0) == np.arange(5)).all()
            comm.send(np.ones(3), 1)
        else:
            there = comm.recv(FakeArray(np.zeros(3), index=1), 2)
            assert (there.there == 1).all()
        comm.broadcast(x, root=1)
        np.testing.assert_array_equal(read(x), vector(1))

    run_local(3, take)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_gives_the_same_bits_as_without_devices(name: str) -> None:
    """Rank 0 has a device and rank 1 has none."""

    def take(comm: Communicator, ranks: tuple[int, ...]) -> Any:
        aggregator = ALGORITHMS[name]().start(comm, N)
        for _ in range(2):
            result = aggregator.aggregate(on_device(comm, vector(comm.rank), ranks))
        return read(result)

    plain, mixed = (run_local(2, lambda comm, ranks=ranks: take(comm, ranks)) for ranks in ((), (0,)))
    for one, other in zip(plain, mixed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_calls_in_flight_keep_their_order_however_long_a_device_takes() -> None:
    """A copy of the first call is still under way when the second begins, on one rank alone."""

    def take(comm: Communicator) -> list[Any]:
        first = comm.iallreduce(on_device(comm, vector(comm.rank)))
        second = comm.iallreduce(vector(comm.rank, np.float64))
        return [read(second.wait()), read(first.wait())]

    for later, earlier in run_local(2, take):
        np.testing.assert_array_equal(later, vector(0, np.float64) + vector(1, np.float64))
        np.testing.assert_array_equal(earlier, vector(0) + vector(1))


def test_a_call_is_numbered_before_the_copy_where_its_sum_is_compared(comm: Communicator) -> None:
    """Also without `verify`: small vectors are summed in the messages of the check."""
    numbers = []
    for call in (Call(comm, lambda: "compared"), Call(comm, lambda: "not compared")):
        call.is_compared = "not" not in call.name()
        comm.verifies = False
        comm.enter(call)
        numbers.append(call.number)
    assert numbers[0] > 0
    assert numbers[1] == 0


def test_a_device_that_computes_longer_than_the_timeout_comes_late_and_is_not_silent() -> None:
    class Busy:
        def __init__(self, copy: Any) -> None:
            self.copy, self.until = copy, time.monotonic() + 1.5

        def Test(self) -> bool:  # noqa: N802 - MPI's name
            return time.monotonic() > self.until and self.copy.Test()

    with Communicator(timeout=0.5, arrival_timeout=60, abort_hook=False) as comm:
        device = arrays.device_at(arrays.CUDA, 0)
        copy = device.copy

        def late(source: Any, target: Any) -> Any:
            return Busy(copy(source, target)) if isinstance(target, np.ndarray) else copy(source, target)

        device.copy = late
        comm.allreduce(FakeArray(vector(0)))


def test_bfloat16_is_moved_as_it_is() -> None:
    bits = np.array([0x3F80, 0x4000, 0xBF80], np.uint16)  # 1, 2, -1

    def take(comm: Communicator) -> Any:
        return read(comm.allreduce(FakeArray(bits, "bfloat16", comm.rank)))

    for found in run_local(2, take):
        np.testing.assert_array_equal(found, [0x4000, 0x4080, 0xC000])


def test_overlapping_arrays_of_a_device_are_refused(comm: Communicator) -> None:
    memory = np.zeros(2 * N, np.float32)
    x, part = FakeArray(memory[:N]), FakeArray(memory[5 : N + 5])
    with pytest.raises(ValueError, match="out overlaps the array"):
        comm.allreduce(x, out=part)
    with pytest.raises(ValueError, match="out shares memory with the vector"):
        Dense().start(comm, N).aggregate(x, part)


def test_an_array_that_is_not_contiguous_is_refused_on_all_ranks() -> None:
    def take(comm: Communicator) -> None:
        x = np.zeros(2 * N, np.float32)[::2] if comm.rank == 0 else np.zeros(N, np.float32)
        with pytest.raises(ValueError if comm.rank == 0 else CollectiveMismatch, match=r"not contiguous.*on fake:0"):
            comm.allreduce(on_device(comm, x))
        comm.barrier()

    run_local(2, take)


def test_a_type_without_arithmetic_is_refused(comm: Communicator) -> None:
    with pytest.raises(TypeError, match="elements of type float8_e5m2"):
        comm.allreduce(FakeArray(np.zeros(N, np.uint8), "float8_e5m2"))


def test_where_there_is_no_pinned_memory_left_all_ranks_are_told_and_can_go_on(made: dict[int, FakeDevice]) -> None:
    made[0] = FakeDevice()
    made[0].has_memory = False

    def take(comm: Communicator) -> None:
        aggregator = Marsit().start(comm, N)
        with pytest.raises(MemoryError if comm.rank == 0 else CollectiveMismatch, match="no pinned memory"):
            aggregator.aggregate(on_device(comm, vector(comm.rank)))
        comm.barrier()
        made[0].has_memory = True
        aggregator.aggregate(on_device(comm, vector(comm.rank)))

    run_local(2, take)


@pytest.mark.parametrize("topology", [Ring(), "auto"], ids=["ring", "auto"])
@pytest.mark.parametrize("background", [False, True])
def test_a_sum_for_which_there_is_no_pinned_memory_is_rejected_on_all_ranks(
    topology: Any, background: bool, made: dict[int, FakeDevice]
) -> None:
    made[0] = FakeDevice()
    made[0].has_memory = False

    def take(comm: Communicator) -> None:
        x = on_device(comm, vector(comm.rank))

        def add() -> Any:
            return comm.iallreduce(x).wait() if background else comm.allreduce(x)

        error = MemoryError if comm.rank == 0 else CollectiveMismatch
        with pytest.raises(error, match=r"rank 0.* i?allreduce\(sum\).*no pinned memory to take 700 elements"):
            add()
        comm.barrier()
        made[0].has_memory = True
        assert (read(add()) == vector(0) + vector(1)).all()

    run_local(2, take, topology)


def test_a_device_that_is_gone_ends_the_call_and_changes_nothing(comm: Communicator) -> None:
    aggregator = Marsit().start(comm, N)
    aggregator.aggregate(vector(0))
    before = aggregator.state_dict()
    gone = arrays.device_at(arrays.CUDA, 0)
    gone.broken = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        aggregator.aggregate(FakeArray(vector(0)))
    np.testing.assert_array_equal(aggregator.state_dict()["residual"], before["residual"])


def test_a_copy_that_does_not_end_is_told_with_rank_device_and_call() -> None:
    class Never:
        def Test(self) -> bool:  # noqa: N802 - MPI's name
            time.sleep(0.001)
            return False

    with Communicator(timeout=0.2, arrival_timeout=0.2, abort_hook=False) as comm:
        arrays.device_at(arrays.CUDA, 0).copy = lambda *ends: Never()
        with pytest.raises(
            CollectiveTimeout, match=r"rank 0 of 1: the copy from fake:0 does not end.*broadcast\(root=0\)"
        ):
            comm.broadcast(FakeArray(vector(0)))


def test_a_device_of_another_kind_is_refused(comm: Communicator) -> None:
    class Elsewhere(FakeArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 7, 2

    with pytest.raises(ValueError, match=r"device \(7, 2\), which cannot be reached: pass a copy in CPU memory"):
        comm.allreduce(Elsewhere(vector(0)))


def test_a_gpu_without_pytorch_for_it_is_told(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("PyTorch finds a GPU here")
    monkeypatch.setitem(arrays.MAKERS, arrays.CUDA, arrays.MAKERS[ROCM])
    with pytest.raises(ValueError, match="on GPU 0, but PyTorch finds none: install its build for the GPU"):
        comm.allreduce(FakeArray(vector(0)))


# After a copy --------------------------------------------------------------------------------------------------------


class Copy:
    """A copy that is complete at the second test."""

    asked = 0

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        self.asked += 1
        return self.asked > 1


def test_what_follows_a_copy_is_done_once_however_often_it_is_tested() -> None:
    done: list[str] = []
    landed = Landed(Copy(), lambda: done.append("once"))
    assert [landed.Test() for _ in range(4)] == [False, True, True, True]
    assert done == ["once"]


def test_what_fails_behind_a_copy_is_raised_once_and_not_tried_again() -> None:
    landed = Landed(Copy(), lambda: 1 // 0)
    assert not landed.Test()
    with pytest.raises(ZeroDivisionError):
        landed.Test()
    assert landed.Test()
