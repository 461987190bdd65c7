"""Dense takes the devices that other methods encode on, and sends the whole vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, Ring
from collectives.threads.run_local import run_local
from mpicomp import Dense
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu import on_device


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeDevice]:
    """Give the fake devices, which are made when they are asked for."""
    return on_device.fake_devices(monkeypatch)


@pytest.mark.parametrize("method", [Dense(), Dense(wire="float16")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_those_of_the_cpu(method: Any, dtype: str) -> None:
    on_device.assert_same_as_on_cpu(method, 300, dtype)


def test_the_vector_crosses_as_it_is_wherever_it_lies(made: dict[int, FakeDevice]) -> None:
    x = on_device.vector(0, 0, 100, "float16")
    with Communicator() as comm:
        aggregator = Dense().start(comm, 100, dtype="float16", device="cuda")
        np.testing.assert_array_equal(aggregator.aggregate(FakeArray(x)).there, x)
        assert made[0].copied == [200, 200]
        np.testing.assert_array_equal(aggregator.aggregate(x), x)


def test_a_device_that_is_not_there_is_refused_on_all_ranks() -> None:
    def take(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(ValueError, match="rank 0 of 2, start: there is no device 'tpu': write 'cpu', 'cuda'"):
                Dense().start(comm, 10, device="tpu")
        else:
            aggregator = Dense().start(comm, 10, device="cuda")
            with pytest.raises(CollectiveMismatch, match="there is no device 'tpu'"):
                aggregator.aggregate(FakeArray(np.zeros(10, np.float32)))

    run_local(2, take, Ring())
