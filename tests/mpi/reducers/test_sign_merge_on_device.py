"""Signs that MPI is handed by their addresses on a device, and that are merged there; a fake one's are the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays import CUDA, MAKERS
from collectives.arrays.gpu_mpi import verdict
from collectives.arrays.gpu_mpi.verdict import Outcome
from mpicomp import Marsit
from mpicomp.reducers import sign_merge
from tests.fake_device import FakeArray, FakeDevice
from tests.mpi.lanes import few_ranks, same_everywhere

pytestmark = [few_ranks, pytest.mark.gpu]

N = 4096 * 4 + 130
STEPS = 2


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Give the device that each rank has, whose memory MPI takes."""
    one = FakeDevice(0)
    monkeypatch.setitem(MAKERS, CUDA, lambda index: one)
    monkeypatch.setattr(verdict.verdict, "outcome", Outcome(works=True, said="was faked"))
    monkeypatch.setattr(sign_merge, "DIRECT_BYTES", 0)
    return one


@pytest.mark.parametrize("comm", ["ring", "double-tree"], indirect=True)
@pytest.mark.parametrize("background", [False, True])
def test_bits_are_those_of_the_host_though_ranks_differ(
    comm: Communicator, background: bool, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third rank encodes in the host's memory."""
    monkeypatch.setattr(sign_merge, "BRIEF_ELEMENTS", 0)
    method, there = Marsit(full_precision_every=None, global_step=0.1), comm.rank % 3 != 2

    def train(on_device: bool) -> list[Any]:
        aggregator, results = method.start(comm, N, device="cuda" if on_device else "cpu"), list[Any]()
        for step in range(STEPS):
            x: Any = np.random.default_rng((comm.rank, step)).standard_normal(N).astype(np.float32)
            given = FakeArray(x) if on_device else x
            result = aggregator.begin(given).wait() if background else aggregator.aggregate(given)
            results.append(np.array(getattr(result, "there", result)))
        return [*results, aggregator.state_dict()["residual"]]

    expected, found = train(on_device=False), train(on_device=there)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(same_everywhere(comm, result) for result in found[:STEPS])
