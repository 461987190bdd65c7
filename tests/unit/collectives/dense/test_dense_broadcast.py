"""Broadcasts of arrays on devices go from device to device where all ranks can, and else through the host."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays import CUDA, MAKERS
from collectives.dense import broadcast_gather
from collectives.threads.run_local import run_local
from tests.fake_device import FakeArray, FakeDevice

N = 1003


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeDevice]:
    """Give the fake devices of three ranks, and let all vectors be long and have several pieces."""
    known = {index: FakeDevice(index) for index in range(3)}
    monkeypatch.setitem(MAKERS, CUDA, known.__getitem__)
    monkeypatch.setattr(broadcast_gather, "DIRECT_BYTES", 1)
    monkeypatch.setattr(broadcast_gather, "PIECE_BYTES", 256)
    return known


def able(monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...]) -> None:
    """Let some ranks hand memory of fake devices to MPI."""

    def allowed(call: Any, device: str) -> Generator[bool, None, bool]:
        yield True
        return int(device[-1]) in ranks

    monkeypatch.setattr(broadcast_gather, "takes_device_memory", allowed)


def values(rank: int, dtype: str = "float32") -> Any:
    return (np.random.default_rng(rank).standard_normal(N) * 100).astype(dtype)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize(
    ("with_device", "allowed", "copies"),
    [
        ((0, 1, 2), (0, 1, 2), [0, 0, 0]),
        ((0, 1, 2), (0, 2), [1, 1, 1]),
        ((0, 1, 2), (1,), [1, 1, 1]),
        ((0, 2), (0, 2), [1, 0, 1]),
        ((), (), [0, 0, 0]),
    ],
    ids=["all can", "one cannot", "only one can", "one has no device", "none has a device"],
)
def test_all_ranks_have_the_roots(
    with_device: tuple[int, ...],
    allowed: tuple[int, ...],
    copies: list[int],
    root: int,
    verify: bool,
    made: dict[int, FakeDevice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    able(monkeypatch, allowed)

    def take(comm: Communicator) -> None:
        for step in range(2):
            x = values(comm.rank + 10 * step)
            there = FakeArray(x, index=comm.rank) if comm.rank in with_device else x
            assert comm.broadcast(there, root) is there
            np.testing.assert_array_equal(x, values(root + 10 * step))

    run_local(3, take, verify=verify)
    assert [len(made[rank].copied) for rank in range(3)] == [2 * count for count in copies]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "bfloat16", "float64"])
def test_every_type_can_go_directly(dtype: str, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    able(monkeypatch, (0, 1, 2))
    stored = "uint16" if dtype == "bfloat16" else dtype

    def take(comm: Communicator) -> None:
        x = values(comm.rank, stored)
        comm.broadcast(FakeArray(x, dtype, comm.rank), 1)
        np.testing.assert_array_equal(x, values(1, stored))

    run_local(3, take)
    assert not any(device.copied for device in made.values())


def test_kernels_that_make_the_array_or_still_use_its_memory_are_waited_for(
    made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    able(monkeypatch, (0, 1))

    def take(comm: Communicator) -> None:
        x = np.zeros(N)
        made[comm.rank].run(lambda: x.fill(7 if comm.rank == 0 else 5))
        comm.broadcast(FakeArray(x, index=comm.rank))
        made[comm.rank].go_on(1, 0)
        assert (x == 7).all()

    run_local(2, take)


def test_short_arrays_are_not_asked_about(made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    able(monkeypatch, (0, 1))
    monkeypatch.setattr(broadcast_gather, "DIRECT_BYTES", 4 * N + 1)
    run_local(2, lambda comm: comm.broadcast(FakeArray(values(comm.rank), index=comm.rank)))
    assert [len(made[rank].copied) for rank in range(2)] == [1, 1]
