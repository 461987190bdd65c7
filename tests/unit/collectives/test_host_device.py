"""The host as a device: what it is asked for has happened when the call returns."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.devices import HOST_DEVICE, HostDevice, Landed, after_copy, named, wait
from collectives.execution.handle import Call
from collectives.progress.polling import done


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
    assert HOST_DEVICE.copy(vector, landing) is None  # type: ignore[func-returns-value]
    assert HOST_DEVICE.done() is None  # type: ignore[func-returns-value]
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
    torch = pytest.importorskip("torch")
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
    assert list(done(Call(comm, lambda: "a call"), None)) == []  # type: ignore[arg-type]
