"""Relay has the bits of the CPU where hops add and encode on a device, and ranks of both kinds mix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import Communicator, DoubleTree, HalvingDoubling, NonFiniteGradient, Ring
from collectives.threads.run_local import run_local
from mpicomp import DoubleSqueeze, Relay
from mpicomp.codecs import Levels
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu.on_device import (
    assert_nan_is_told_and_nothing_lost,
    assert_same_as_on_cpu,
    given,
    start,
    train,
    vector,
)

pytestmark = pytest.mark.usefixtures("made")

LENGTHS = (500, 1, 100)  # 12 and 63 elements of padding between them, and 28 behind


@pytest.mark.parametrize(
    ("method", "n", "dtype", "lengths", "ranks"),
    [
        (Relay(bucket=64), 700, "float32", None, 3),
        (Relay(2, 64, "copy"), 704, "float32", LENGTHS, 2),
        (Relay(3, 64), 704, "bfloat16", LENGTHS, 3),
        (Relay(8, 64), 704, "float64", LENGTHS, 2),
        (Relay(16, 320), 700, "float16", None, 2),
        (Relay(256), 704, "float32", LENGTHS, 3),
        (Relay(), 300, "float32", None, 1),
        (Relay(4, 128, "copy"), 300, "bfloat16", None, 1),
        (Relay(), 1, "float64", None, 2),
        (Relay(), 0, "float32", None, 2),
        (DoubleSqueeze("levels:levels=3"), 700, "float32", None, 2),
        (DoubleSqueeze("levels:bucket=64", residual="copy"), 333, "float64", None, 3),
    ],
    ids=str,
)
def test_results_and_states_are_those_of_the_cpu(method: Any, n: int, dtype: str, lengths: Any, ranks: int) -> None:
    """Only the last rank has a device."""
    assert_same_as_on_cpu(method, n, dtype, lengths, ranks=ranks)


@pytest.mark.parametrize(("levels", "dtype"), [(3, "float32"), (4, "bfloat16"), (256, "float64")])
def test_short_vectors_that_are_gathered_have_the_bits_of_the_cpu(levels: int, dtype: str) -> None:
    def results(*on_devices: int) -> list[list[Any]]:
        return run_local(3, lambda comm: train(comm, Relay(levels), 704, dtype, on_devices, LENGTHS), "auto")

    for mine, expected in zip(results(0, 2), results(), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("topology", "polls", "options"),
    [(Ring(), 60, {"threads": 2}), (DoubleTree(), 1, {}), (HalvingDoubling(), 60, {})],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_plan_goes_over_devices(topology: Any, polls: int, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ranks have one, which ends its work soon or long after the next messages; then the others have."""
    monkeypatch.setattr("tests.fake_device.POLLS", polls)
    monkeypatch.setattr("mpicomp.algorithms.relay.BRIEF_ELEMENTS", 0)

    def results(*there: int) -> list[list[Any]]:
        of_rank: Any = lambda comm: train(comm, Relay(bucket=64), 600, "float32", there)  # noqa: E731
        return run_local(4, of_rank, topology, piece_bytes=64, **options)

    for mine, expected in zip(results(0, 3), results(), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("method", "bad_rank", "dtype"),
    [
        (Relay(3), 0, "float32"),
        (Relay(), 1, "bfloat16"),
        (Relay(256), 0, "float64"),
        (DoubleSqueeze("levels:levels=16"), 0, "float32"),
    ],
    ids=str,
)
def test_nan_is_told_on_all_ranks_and_nothing_is_lost(method: Any, bad_rank: int, dtype: str) -> None:
    assert_nan_is_told_and_nothing_lost(method, 300, dtype, bad_rank)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
def test_a_sum_that_overflows_is_no_ranks_fault() -> None:
    """It overflows on rank 1, on a device; the step behind it has the bits of one without it."""

    def take(comm: Communicator, there: bool) -> Any:
        there = there and comm.rank == 1
        aggregator = start(comm, Relay(), 128, "float32", there)
        with pytest.raises(NonFiniteGradient, match="no rank"):
            aggregator.aggregate(given(np.full(128, 3e38, np.float32), "float32", 1 if there else None))
        aggregator.aggregate(given(vector(comm.rank, 1, 128), "float32", 1 if there else None))
        return aggregator.state_dict()["residual"]

    found, expected = (run_local(2, lambda comm, on=on: take(comm, on), Ring()) for on in (True, False))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_codes_cross_and_each_piece_takes_two_kernels(made: dict[int, FakeDevice]) -> None:
    """One of three chunks is encoded; two are received and added, and two sums arrive that others have completed."""
    chunk, ranks = 1024, 3

    def take(comm: Communicator) -> None:
        aggregator = start(comm, Relay(), ranks * chunk, "float32", comm.rank == 1)
        for step in range(2):
            if comm.rank == 1:
                made[1].copied.clear()
                made[1].launches.clear()
            x = vector(comm.rank, step, ranks * chunk)
            aggregator.aggregate(FakeArray(x, index=1) if comm.rank == 1 else x)

    run_local(ranks, take, Ring())
    flags = [1] * ranks
    assert sorted(made[1].copied) == flags + [Levels().nbytes(chunk)] * (ranks + 2 * (ranks - 1))
    assert sorted(made[1].launches) == ["_relay_kernel"] * ranks + ["_spread_kernel"] * ranks + ["fill_"]
