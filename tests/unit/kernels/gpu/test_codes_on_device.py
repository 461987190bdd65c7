"""Methods whose ranks send codes have the bits of the CPU where they encode and decode on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import Communicator, NonFiniteGradient, Ring, Star
from collectives.threads.run_local import run_local
from mpicomp import ECQSGD, QSGD, DoubleSqueeze, LocalTopK, MemSGD, OneBitSGD, TernGrad, TopKSGD
from mpicomp.codecs.full_precision import FullPrecision, Rounded
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu.on_device import (
    assert_nan_is_told_and_nothing_lost,
    assert_same_as_on_cpu,
    bits,
    given,
    start,
    train,
    vector,
)

pytestmark = pytest.mark.usefixtures("made")


@pytest.mark.parametrize(
    ("method", "n", "dtype"),
    [
        (QSGD(bucket=64), 1300, "float32"),
        (QSGD(bucket=70, norm="l2", coding="entropy", levels=2), 700, "float64"),
        (ECQSGD(alpha=0.1, bucket=128), 700, "float32"),
        (ECQSGD(alpha=0.1, beta=0.9, coding="fixed", norm="linf"), 700, "float64"),
        (TernGrad(bucket=100), 700, "float32"),
        (TernGrad(bucket=64, clip=None), 700, "float64"),
        (OneBitSGD(bucket=64), 1300, "float32"),
        (TopKSGD(10), 700, "float32"),
        (LocalTopK(10, chunk=70), 700, "float64"),
        (DoubleSqueeze(), 700, "float32"),
        (DoubleSqueeze("quantize:bucket=64,coding=entropy"), 700, "float32"),
        (DoubleSqueeze("ternary:bucket=64"), 700, "float64"),
        (DoubleSqueeze("clip:bits=13"), 700, "float32"),
        (DoubleSqueeze("top-k:rate=10"), 700, "float64"),
        (DoubleSqueeze("random-sparsification:p=0.3"), 1300, "float32"),
        (DoubleSqueeze("random-sparsification:p=1"), 700, "float64"),
        (DoubleSqueeze(Rounded("float16")), 700, "float32"),
        (MemSGD("two-means:bucket=50"), 700, "float32"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_results_and_states_are_those_of_the_cpu(method: Any, n: int, dtype: str) -> None:
    assert_same_as_on_cpu(method, n, dtype)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        (QSGD(bucket=64), "bfloat16"),
        (DoubleSqueeze("one-bit:bucket=64"), "float16"),
        (MemSGD("top-k:rate=10"), "bfloat16"),
    ],
    ids=str,
)
def test_results_of_16_bits_are_those_of_the_cpu(method: Any, dtype: str) -> None:
    assert_same_as_on_cpu(method, 1300, dtype)


@pytest.mark.parametrize("method", [QSGD(bucket=64), DoubleSqueeze("one-bit:bucket=64")], ids=str)
def test_three_ranks_have_the_mean_of_the_cpu(method: Any) -> None:
    """A third is no number of the host's: the sum is divided, not multiplied with it."""
    assert_same_as_on_cpu(method, 1300, "float32", ranks=3)


@pytest.mark.parametrize("method", [QSGD(bucket=64), OneBitSGD(bucket=64), LocalTopK(10), DoubleSqueeze()], ids=str)
def test_a_rank_alone_averages_nothing_but_its_own_code_of_each_piece(method: Any) -> None:
    assert_same_as_on_cpu(method, 4000, "float32", ranks=1)


@pytest.mark.parametrize("method", [QSGD(bucket=64), LocalTopK(10), MemSGD("two-means:bucket=64")], ids=str)
def test_servers_average_codes_of_devices(method: Any) -> None:
    """Rank 1 encodes on a device, and the server, rank 0, on the CPU; half way they change places."""

    def results(*on_devices: int) -> list[list[Any]]:
        return run_local(2, lambda comm: train(comm, method, 700, "float32", on_devices), Star(), piece_bytes=512)

    for mine, expected in zip(results(1), results(), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, other)


METHODS = [
    QSGD(bucket=64),
    ECQSGD(alpha=0.1, bucket=64),
    TernGrad(bucket=64),
    OneBitSGD(bucket=64),
    LocalTopK(10),
    DoubleSqueeze("clip:bits=13"),
    DoubleSqueeze("random-sparsification:p=0.3"),
    MemSGD("quantize:bucket=64"),
]


@pytest.mark.parametrize(("method", "bad_rank"), [(one, index % 2) for index, one in enumerate(METHODS)], ids=str)
def test_nan_is_told_on_all_ranks_and_nothing_is_lost(method: Any, bad_rank: int) -> None:
    assert_nan_is_told_and_nothing_lost(method, 300, "float32", bad_rank)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("method", [LocalTopK(10, chunk=100), OneBitSGD(bucket=64)], ids=str)
def test_overflow_is_no_ranks_fault(method: Any) -> None:
    """Rank 0, which has a device, adds its residual to numbers that are as large as there are."""

    def take(comm: Communicator) -> None:
        there = comm.rank == 0
        aggregator = start(comm, method, 300, "float32", there)
        largest = np.full(300, np.finfo(np.float32).max if there else 0, np.float32)

        def step(values: Any) -> None:
            aggregator.aggregate(given(values, "float32", 0 if there else None))

        step(np.where(np.arange(300) % 3, largest / 2, 0).astype(np.float32))
        before = aggregator.state_dict()["residual"]
        with pytest.raises(NonFiniteGradient, match=r"no rank \(the sum overflowed") as caught:
            step(largest)
        assert caught.value.ranks == ()
        np.testing.assert_array_equal(aggregator.state_dict()["residual"], before)

    run_local(2, take, Ring())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
def test_a_sum_beyond_the_type_is_told_on_all_ranks() -> None:
    """Rank 0, which has a device, finds it out there."""

    def take(comm: Communicator) -> None:
        there = comm.rank == 0
        aggregator = start(comm, TopKSGD(10), 300, "float32", there)
        largest = np.full(300, np.finfo(np.float32).max)
        with pytest.raises(NonFiniteGradient, match=r"no rank \(the sum overflowed"):
            aggregator.aggregate(given(largest, "float32", 0 if there else None))

    run_local(2, take, Ring())


def test_a_step_that_is_undone_leaves_the_residual_on_the_device() -> None:
    with Communicator() as comm:
        aggregator = start(comm, LocalTopK(10), 300, "float32", True)
        aggregator.aggregate(given(vector(0, 0, 300), "float32", 0))
        before = aggregator.state_dict()["residual"]
        aggregator.aggregate(given(vector(0, 1, 300), "float32", 0))
        aggregator.undo()
        np.testing.assert_array_equal(aggregator.state_dict()["residual"], before)


def test_only_codes_cross(made: dict[int, FakeDevice]) -> None:
    n, method = 8192, QSGD(bucket=512)
    with Communicator() as comm:
        aggregator = start(comm, method, n, "float32", True)
        aggregator.aggregate(FakeArray(vector(0, 0, n)))
        assert sum(made[0].copied) == method.codec.nbytes(n) + 16 + 1  # and whether vector and result are finite


def test_compressors_that_know_no_devices_are_refused(comm: Communicator) -> None:
    class Plain:
        alignment, nbytes, encode, decode = 64, FullPrecision.nbytes, FullPrecision.encode, FullPrecision.decode
        encodes_on_devices, out_of_range = False, ""

    with pytest.raises(ValueError, match="on the CPU alone, not on cuda; leave out device"):
        DoubleSqueeze(Plain()).start(comm, 10, device="cuda")


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of Triton's interpreter
def test_finite_numbers_without_a_code_are_told_on_all_ranks() -> None:
    """Rank 0, which has a device, has a number beyond float16."""

    def take(comm: Communicator) -> None:
        there = comm.rank == 0
        aggregator = start(comm, DoubleSqueeze(Rounded("float16")), 300, "float32", there)
        values = np.full(300, 70_000 if there else 1, np.float32)
        with pytest.raises(NonFiniteGradient, match="from rank 0, are beyond the range of float16"):
            aggregator.aggregate(given(values, "float32", 0 if there else None))

    run_local(2, take, Ring())


@pytest.mark.parametrize("method", [QSGD(bucket=64), DoubleSqueeze("one-bit:bucket=64")], ids=str)
def test_several_threads_have_the_same_bits(method: Any) -> None:
    def results(*on_devices: int) -> list[list[Any]]:
        made = {"piece_bytes": 512, "threads": 2}
        return run_local(2, lambda comm: train(comm, method, 2900, "float32", on_devices), Ring(), **made)

    for mine, expected in zip(results(1), results(), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_vectors_may_be_empty() -> None:
    with Communicator() as comm:
        for method in METHODS:
            x = given(vector(0, 0, 0), "float32", 0)
            assert bits(start(comm, method, 0, "float32", True).aggregate(x)).size == 0
