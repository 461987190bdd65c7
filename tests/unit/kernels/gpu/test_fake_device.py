"""The tests' device finds code that uses memory too late, copies too early, or launches kernels elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives.arrays import wait
from tests.fake_device import FakeDevice


@pytest.fixture(autouse=True)
def interpreted(device: str) -> None:
    """Skip where kernels are not interpreted."""
    if device == "cuda":
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")


def test_memory_that_is_released_is_poisoned_and_handed_out_next() -> None:
    device = FakeDevice()
    vector = device.zeros(8, "float32")
    view, address = vector[2:], vector.data_ptr()
    del vector
    assert not view.isnan().any()
    del view
    assert np.isnan(device.pinned(32).view(np.float32)).all()  # of another pool
    assert device.zeros(8, "float32").data_ptr() == address
    stale = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 8).from_address(address))
    assert np.isnan(stale).all()


@pytest.mark.parametrize(("order", "landed"), [("early", 1), ("late", 2)])
def test_copies_are_made_early_or_late(order: str, landed: int) -> None:
    """A kernel that overwrites a vector on its way to the host is an error, which both orders show differently."""
    device = FakeDevice(order=order)
    vector, host = device.zeros(4, "float32"), np.zeros(4, np.float32)
    device.run(lambda: vector.fill_(1))
    copy = device.copy(vector, host)
    device.run(lambda: vector.fill_(2))
    wait(device.done())
    wait(copy)
    assert (host == landed).all()


def test_a_random_order_takes_both_ways() -> None:
    seen = set[float]()
    for seed in range(20):
        device = FakeDevice(order=seed)
        vector, host = device.zeros(1, "float32"), np.zeros(1, np.float32)
        device.run(lambda vector=vector: vector.fill_(1))
        copy = device.copy(vector, host)
        device.run(lambda vector=vector: vector.fill_(2))
        wait(copy)
        seen.add(float(host[0]))
    assert seen == {1.0, 2.0}


def test_kernels_outside_of_the_device_s_run_fail() -> None:
    from mpicomp.kernels.gpu import sign

    device, other = FakeDevice(0, "early"), FakeDevice(1, "early")
    vector = device.zeros(64, "float32")
    with pytest.raises(AssertionError, match="launched outside of fake:0's run"):
        sign.all_finite(vector)
    with pytest.raises(AssertionError, match="launched outside of fake:0's run"):
        other.run(lambda: sign.all_finite(vector))
    device.run(lambda: sign.all_finite(vector))


def test_kernels_of_triton_and_of_pytorch_are_counted() -> None:
    from mpicomp.kernels.gpu import sign

    device = FakeDevice(order="early")
    vector = device.zeros(64, "float32")
    device.run(lambda: sign.all_finite(vector[:32].view(torch.float32)))
    device.run(lambda: vector.add_(1).view(torch.int32)[3:].clone())
    assert device.launches == ["ones", "_all_finite_kernel", "add_", "clone"]
