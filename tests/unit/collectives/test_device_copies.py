"""What kernels and copies of a device wait for: by PyTorch's streams, and of the device that tests have instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives.devices import wait
from tests.fake_device import FakeDevice
from tests.fake_streams import StreamsDevice

N = 4


@pytest.fixture(params=[StreamsDevice, FakeDevice])
def device(request: pytest.FixtureRequest) -> Any:
    """Give a device that does nothing but what is asked for, and what that waits for."""
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
