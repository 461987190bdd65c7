"""Order of kernels and copies on PyTorch's streams and on the tests' own device; and the host as a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives.arrays import HOST_DEVICE, HostDevice, Landed, after_copy, named, torch_device, wait
from collectives.arrays.elements import PAGE, aligned_empty
from collectives.execution.call import Call
from collectives.progress.polling import done
from tests.fake_device import FakeDevice
from tests.fake_streams import StreamsDevice

N = 4


@pytest.fixture(params=[StreamsDevice, FakeDevice])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a device that works on demand only, with the list of its pending work."""
    monkeypatch.setattr(torch_device, "SHORT_BYTES", 0)  # each copy has a stream of its own, as long ones have
    return request.param()


def host(value: int = 0) -> NDArray[np.float32]:
    return np.full(N, value, np.float32)


def there(device: Any) -> tuple[Any, NDArray[np.float32]]:
    """Give a vector on the device, and its values."""
    vector = device.zeros(N, "float32")
    return vector, vector.numpy() if isinstance(vector, torch.Tensor) else vector.values


def fill(device: Any, values: NDArray[np.float32], value: int) -> None:
    device.run(lambda: values.fill(value))


def test_a_copy_to_the_device_does_not_wait_for_one_to_the_host(device: Any) -> None:
    (sent, _), (arrived, values), landed = there(device), there(device), host(7)
    device.copy(sent, landed)
    wait(device.copy(host(1), arrived))
    assert (values == 1).all()
    assert (landed == 7).all()


def test_a_copy_to_the_host_does_not_wait_for_one_to_the_device(device: Any) -> None:
    """Not even where a kernel has been launched, before both or behind them."""
    (sent, sent_values), (arrived, values), landed = there(device), there(device), host()
    fill(device, sent_values, 1)
    device.copy(host(2), arrived)
    copied = device.copy(sent, landed)
    fill(device, sent_values, 3)
    wait(copied)
    assert (landed == 1).all()
    assert not values.any()


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_follows_upon_the_kernels_before_and_upon_those_in_its_direction(device: Any, to_host: bool) -> None:
    (vector, values), (other, other_values) = there(device), there(device)
    first, second = host(1), host(2)
    fill(device, values, 3)
    if to_host:
        device.copy(vector, first)
        wait(device.copy(other, second))
        assert (first == 3).all()
    else:
        device.copy(first, vector)
        wait(device.copy(second, other))
        wait(device.done())
        assert (values == 1).all()
        assert (other_values == 2).all()


def test_a_kernel_that_comes_after_a_copy_to_the_device_is_followed_by_a_copy_to_the_host(device: Any) -> None:
    (vector, values), landed = there(device), host()
    device.copy(host(2), vector)
    device.run(lambda: np.add(values, 1, out=values))
    wait(device.copy(vector, landed))
    assert (landed == 3).all()


def test_kernels_follow_upon_copies_to_the_device_and_do_not_wait_for_those_to_the_host(device: Any) -> None:
    (vector, values), landed = there(device), host(7)
    device.copy(vector, landed)
    device.copy(host(2), vector)
    device.run(lambda: np.add(values, 1, out=values))
    wait(device.done())
    assert (values == 3).all()
    assert (landed == 7).all()


# The host as a device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "uint16"), ("int64", "int64")]
)
def test_vectors_are_arrays_of_numpy(dtype: str, stored: str) -> None:
    vector = HOST_DEVICE.zeros(5, dtype)
    assert (vector.dtype.name, vector.tolist()) == (stored, [0] * 5)


def test_pinned_memory_begins_a_page() -> None:
    memory = HOST_DEVICE.pinned(100)
    assert (memory.dtype, memory.size) == (np.uint8, 100)
    assert memory.ctypes.data % 4096 == 0


def test_work_is_done_when_run_returns_and_so_is_a_copy() -> None:
    vector, landing = HOST_DEVICE.zeros(4, "float64"), np.empty(4)
    HOST_DEVICE.run(lambda: vector.fill(3))
    assert HOST_DEVICE.copy(vector, landing) is None
    assert HOST_DEVICE.done() is None
    assert landing.tolist() == [3] * 4


def test_a_copy_moves_bytes_whatever_their_types() -> None:
    landing = HOST_DEVICE.pinned(8)
    HOST_DEVICE.copy(np.arange(2, dtype=np.float32), landing)
    assert landing.view(np.float32).tolist() == [0, 1]


def test_a_copy_onto_its_own_memory_is_none() -> None:
    vector = np.arange(4.0)
    vector.flags.writeable = False
    HOST_DEVICE.copy(vector[1:3], vector[1:3])  # would raise if anything were written


def test_an_array_is_taken_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    taken = HOST_DEVICE.take(array)
    assert (taken.dtype, taken.shape, taken.contiguous) == ("float32", (2, 3), True)
    assert taken.address == array.ctypes.data
    assert np.shares_memory(taken.vector, array)
    assert HOST_DEVICE.take(array.T).vector is None


def test_tensors_in_the_hosts_memory_are_taken() -> None:
    tensor = torch.ones(3)
    HOST_DEVICE.take(tensor).vector[1] = 5
    assert tensor.tolist() == [1, 5, 1]


def test_cpu_is_its_name() -> None:
    assert isinstance(named("cpu"), HostDevice)
    assert named("cpu") is HOST_DEVICE
    assert named("cpu").name == "cpu"


def test_what_follows_a_copy_of_the_host_is_done_at_once(comm: object) -> None:
    landed: list[str] = []
    assert after_copy(None, lambda: landed.append("at once")) is None
    assert landed == ["at once"]
    assert Landed(None, lambda: landed.append("tested")).Test()
    assert landed == ["at once", "tested"]
    wait(None)
    assert list(done(Call(comm, lambda: "a call"), None)) == []


@pytest.mark.parametrize("n", [1, 1000, 100_000])
def test_buffers_begin_at_a_page(n: int) -> None:
    for alignment in (64, PAGE):
        made = aligned_empty(n, np.float64, alignment)
        assert made.ctypes.data % alignment == 0
        assert made.size == n
