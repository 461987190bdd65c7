"""Kernels and copies of a step on a device, method by method, and the same bits in every order of a device's work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpicomp
from collectives import Communicator, Ring
from collectives.arrays import CUDA, device_at
from collectives.threads.run_local import run_local
from mpicomp import Dense, DoubleSqueeze, Marsit, OneBitSGD, RandomK, ScaleCom, TernGrad
from tests.fake_device import ORDERS, FakeDevice, fake_devices
from tests.unit.kernels.gpu import on_device

N = 2048
LENGTHS = (700, 1, 130, 64, 1, N - 704 - 64 - 192 - 64 - 64)  # six tensors, each padded to a multiple of 64 elements

# Kernels, copies to the host and copies to the device of one step of one piece on one of two ranks. A piece costs one
# kernel and one copy each way; the comments name the exceptions.
BUDGETS: dict[Any, tuple[int, int, int]] = {
    # step sizes cross with the signs of the step before
    Marsit(None): (2, 1, 1),
    Marsit(None, residual="paper"): (2, 1, 1),
    Marsit(None, compensation=False, global_step=0.1): (2, 1, 1),
    # winners are drawn, their signs picked and placed; reports cross beside the winners' signs
    Marsit(None, winners=1): (5, 2, 2),
    Marsit(None, winners=2): (6, 2, 2),
    # a short vector crosses as a whole, beside reports and whether the mean is finite
    Marsit(1): (2, 3, 1),
    # buckets longer than a program, and sums of squares or sides, take a pass of their own before the codes
    mpicomp.QSGD(bucket=64): (2, 2, 1),
    mpicomp.QSGD(bucket=64, coding="entropy"): (2, 2, 1),
    OneBitSGD(): (3, 2, 1),
    mpicomp.TopKSGD(rate=10): (2, 2, 1),
    mpicomp.LocalTopK(rate=10): (2, 2, 1),
    # chunks of more than 128 elements: places are selected, packed, and subtracted
    mpicomp.LocalTopK(rate=10, chunk=200): (25, 2, 1),
    # the residual is added before, and taken up after the codes
    mpicomp.ECQSGD(alpha=0.1, bucket=64): (5, 2, 1),
    # scales are exchanged before, and an odd number of them is padded
    TernGrad(): (8, 3, 2),
    # an odd number of scales is padded; owners' codes are decoded
    DoubleSqueeze(): (4, 2, 1),
    mpicomp.MemSGD(): (5, 2, 1),
    # places are drawn or cross; values are picked and put, zeros and the residual are written
    RandomK(10): (8, 1, 1),
    ScaleCom(10): (8, 1, 2),
    mpicomp.TrueTopK(10): (13, 2, 2),
    # one encodes a sum, one decodes it, of each of two pieces; the flag is set for each step
    mpicomp.Relay(): (5, 4, 2),
}
ONE_OF_EACH = (
    Marsit(2), Marsit(2, residual="paper", transactional=True), Marsit(None, winners=2),
    mpicomp.ECQSGD(alpha=0.1, bucket=64, coding="entropy"), TernGrad(bucket=64), mpicomp.LocalTopK(rate=10),
    DoubleSqueeze(), mpicomp.Relay(bucket=64), ScaleCom(10, beta=0.5), mpicomp.TrueTopK(10), RandomK(10),
    Dense(wire="bfloat16"),
)  # fmt: skip


# Methods whose ranks' codes are gathered: one kernel decodes and averages all of them.
GATHERED = (mpicomp.QSGD(bucket=64), OneBitSGD(), mpicomp.LocalTopK(rate=10), TernGrad())


def steps(comm: Communicator, method: Any, made: dict[int, FakeDevice], count: int) -> tuple[Any, ...]:
    """Take some steps; return the last result, and the counts of the last step."""
    device = made.get(comm.rank)
    there, lengths = device is not None, LENGTHS if method.uses_tensor_lengths else None
    aggregator = on_device.start(comm, method, N, "float32", there, lengths)
    for step in range(count):
        if device is not None:
            device.launches.clear()
            device.to_host = device.to_device = 0
        x = on_device.given(on_device.vector(comm.rank, step, N), "float32", comm.rank if there else None)
        result = on_device.bits(aggregator.aggregate(x))
    return (result,) if device is None else (result, list(device.launches), device.to_host, device.to_device)


@pytest.mark.parametrize("method", BUDGETS, ids=lambda method: str(method)[:60])
def test_kernels_and_copies_of_a_step_are_within_the_budget(method: Any, made: dict[int, FakeDevice]) -> None:
    """Whatever the number of tensors: there are six."""
    device_at(CUDA, 1)
    _, launches, to_host, to_device = run_local(2, lambda comm: steps(comm, method, made, 3), Ring())[1]
    most = BUDGETS[method]
    assert len(launches) <= most[0], launches
    assert to_host <= most[1]
    assert to_device <= most[2]


@pytest.mark.parametrize("method", GATHERED, ids=lambda method: str(method)[:60])
def test_more_ranks_need_no_more_kernels(method: Any, made: dict[int, FakeDevice]) -> None:
    device_at(CUDA, 1)
    of_two, of_five = (run_local(ranks, lambda comm: steps(comm, method, made, 2), Ring())[1][1] for ranks in (2, 5))
    assert len(of_five) == len(of_two)


@pytest.mark.parametrize("method", ONE_OF_EACH, ids=lambda method: str(method)[:60])
def test_every_order_of_copies_has_the_bits_of_the_cpu(
    method: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        pytest.skip("needs the fake device: TRITON_INTERPRET=1")
    expected = run_local(2, lambda comm: steps(comm, method, {}, 2), Ring(), piece_bytes=512)
    for order in ORDERS:
        with monkeypatch.context() as patch:
            made = fake_devices(patch, order)
            device_at(CUDA, 1)
            found = run_local(2, lambda comm, made=made: steps(comm, method, made, 2), Ring(), piece_bytes=512)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one[0], other[0], order)
