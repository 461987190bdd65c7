"""A rank whose device lacks memory says so on all ranks, and all can start again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, arrays
from collectives.threads.run_local import run_local
from mpicomp import DoubleSqueeze, Marsit, Relay, ScaleCom
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu.on_device import vector

N = 200


@pytest.mark.parametrize("method", [Marsit(None), Marsit(None, winners=1), DoubleSqueeze(), ScaleCom(8), Relay()])
def test_a_start_without_memory_can_be_repeated(method: Any, made: dict[int, FakeDevice]) -> None:

    def take(comm: Communicator, device: bool) -> Any:
        there = device and comm.rank == 0
        x = vector(comm.rank, 0, N)
        if there:
            with pytest.raises(MemoryError, match=r"rank 0 of 2, start: cuda cannot hold .* or leave out device"):
                method.start(comm, N, device="cuda")
            made[0].has_memory = True
        elif device:
            with pytest.raises(CollectiveMismatch, match="cuda cannot hold"):
                method.start(comm, N).aggregate(x)
        else:
            method.start(comm, N)  # has taken tags
        aggregator = method.start(comm, N, device="cuda" if there else "cpu")
        result = aggregator.aggregate(FakeArray(x) if there else x)
        return result.there if there else result

    plain = run_local(2, lambda comm: take(comm, False))
    arrays.device_at(arrays.CUDA, 0)
    made[0].has_memory = False
    for one, other in zip(plain, run_local(2, lambda comm: take(comm, True)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("method", [ScaleCom(8, warmup_steps=2), Marsit(None, transactional=True), Relay()])
def test_memory_is_taken_at_the_start(method: Any, made: dict[int, FakeDevice]) -> None:
    with Communicator() as comm:
        aggregator = method.start(comm, N, device="cuda")
        made[0].has_memory = False
        for step in range(3):
            aggregator.aggregate(FakeArray(vector(0, step, N)))
