"""A device's kernels are compiled by `start`, not in the first step."""

from __future__ import annotations

from typing import Any

import pytest

from collectives import Communicator, Ring
from collectives.arrays import CUDA, device_at
from collectives.threads.run_local import run_local
from mpicomp import Marsit, OneBitSGD, ScaleCom
from mpicomp.aggregator import rehearsal
from tests.fake_device import FakeDevice
from tests.unit.kernels.gpu import on_device


@pytest.mark.parametrize(
    ("method", "dtype"), [(Marsit(2), "float32"), (OneBitSGD(), "bfloat16"), (ScaleCom(10, warmup_steps=1), "float32")]
)
def test_the_first_steps_compile_nothing(
    method: Any, dtype: str, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal's vectors are shorter, and have fewer tensors."""
    monkeypatch.setattr(rehearsal, "_compiles_on_devices", lambda: True)
    monkeypatch.setattr(rehearsal, "DEVICE_ELEMENTS", 1024)
    monkeypatch.setattr(rehearsal, "_done", set())
    n, compiled = 4096 + 70, set[Any]()
    device_at(CUDA, 0)

    def take(comm: Communicator) -> None:
        there, lengths = comm.rank == 0, (700, 65, n - 704 - 128) if method.uses_tensor_lengths else None
        aggregator = on_device.start(comm, method, n, dtype, there, lengths)
        if there:
            compiled.update(made[0].forms)
        for step in range(3):
            x = on_device.vector(comm.rank, step, n, dtype)
            aggregator.aggregate(on_device.given(x, dtype, 0 if there else None))

    run_local(2, take, Ring())
    assert compiled
    assert made[0].forms == compiled
