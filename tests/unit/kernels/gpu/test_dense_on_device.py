"""Dense sums vectors on devices as all-reduces do; in 16 bits it rounds there, to the bits of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient, Ring, Star, Topology
from collectives.dense import device_sum
from collectives.threads.run_local import run_local
from mpicomp import Dense
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu import on_device

pytestmark = pytest.mark.usefixtures("made")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_those_of_the_cpu(dtype: str) -> None:
    on_device.assert_same_as_on_cpu(Dense(), 300, dtype)


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_in_16_bits_results_are_those_of_the_cpu(wire: Any, dtype: str) -> None:
    on_device.assert_same_as_on_cpu(Dense(wire=wire), 1300, dtype, ranks=3)


@pytest.mark.parametrize("topology", [Ring(), Star()], ids=["ring", "star"])
@pytest.mark.parametrize("size", [1, 2])
def test_of_16_bits_nothing_but_these_and_flags_cross(
    size: int, topology: Topology, made: dict[int, FakeDevice]
) -> None:
    n = 6400

    def take(comm: Communicator) -> None:
        aggregator = Dense(wire="float16").start(comm, n, dtype="float64", device=f"cuda:{comm.rank}")
        aggregator.aggregate(FakeArray(on_device.vector(comm.rank, 0, n, "float64"), index=comm.rank))

    run_local(size, take, topology)
    for device in made.values():
        copied = [one for one in device.copied if one > 1]
        heads = 16 * len(copied) // 2  # in front of the pieces that cross to the host
        assert sum(copied) == 2 * 2 * n + heads  # this rank's numbers, and the mean


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("there", [0, 1])
def test_a_number_beyond_float16_on_a_device_is_told_on_all_ranks(there: int) -> None:
    """Rank 0 has the number, and rank `there` the device."""

    def take(comm: Communicator) -> None:
        aggregator = on_device.start(comm, Dense(wire="float16"), 300, "float32", comm.rank == there)
        values = np.full(300, 65520 if comm.rank == 0 else 1, np.float32)
        with pytest.raises(NonFiniteGradient, match=r"from rank 0, are beyond the range of float16.*pass wire='bfloat"):
            aggregator.aggregate(on_device.given(values, "float32", comm.rank if comm.rank == there else None))
        assert aggregator.step == 0

    run_local(2, take, Ring())


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_nan_is_told_on_all_ranks_also_in_16_bits(bad_rank: int) -> None:
    on_device.assert_nan_is_told_and_nothing_lost(Dense(wire="bfloat16"), 300, "float32", bad_rank)


def test_on_one_rank_nothing_crosses_but_whether_a_vector_on_the_device_is_finite(made: dict[int, FakeDevice]) -> None:
    x = on_device.vector(0, 0, 100, "float16")
    with Communicator() as comm:
        aggregator = Dense().start(comm, 100, dtype="float16", device="cuda")
        np.testing.assert_array_equal(aggregator.aggregate(FakeArray(x)).there, x)
        assert made[0].copied == [1]
        np.testing.assert_array_equal(aggregator.aggregate(x), x)


def test_a_device_that_is_not_there_is_refused_on_all_ranks() -> None:
    def take(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(ValueError, match="rank 0 of 2, start: there is no device 'tpu': write 'cpu', 'cuda'"):
                Dense().start(comm, 10, device="tpu")
        else:
            aggregator = Dense().start(comm, 10, device="cuda")
            with pytest.raises(CollectiveMismatch, match="there is no device 'tpu'"):
                aggregator.aggregate(on_device.given(np.zeros(10, np.float32), "float32", 0))

    run_local(2, take, Ring())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_long_vectors_are_summed_on_the_device_to_the_same_bits(
    dtype: str, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has a device, and its pieces cross instead of the whole vector."""
    monkeypatch.setattr(device_sum, "STAGED_BYTES", 0)
    n = 700

    def take(comm: Communicator, there: bool) -> Any:
        aggregator = Dense().start(comm, n, dtype=dtype)
        x = on_device.given(on_device.vector(comm.rank, 0, n, dtype), dtype, 0 if there and comm.rank == 0 else None)
        return on_device.bits(aggregator.aggregate(x))

    for found, expected in zip(
        *(run_local(2, lambda comm, t=t: take(comm, t), Ring()) for t in (True, False)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert len(made[0].copied) > 3  # a vector that crosses as a whole, its mean, and whether that is finite


def test_nan_on_a_device_is_told_on_all_ranks_and_the_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sum, "STAGED_BYTES", 0)

    def take(comm: Communicator) -> int:
        aggregator = Dense().start(comm, 300)
        for bad in (0, 1, None):
            x = on_device.vector(comm.rank, 0, 300)
            if comm.rank == bad:
                x[7] = np.nan
            x = on_device.given(x, "float32", 0) if comm.rank == 0 else x
            if bad is None:
                aggregator.aggregate(x)
            else:
                with pytest.raises(NonFiniteGradient, match=f"from rank {bad}"):
                    aggregator.aggregate(x)
        return aggregator.step

    assert run_local(2, take, Ring()) == [1, 1]
