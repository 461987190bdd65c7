"""Jobs of ranks of which some encode on a device, to be compared with those that encode on the CPU.

Where there is a GPU, it is the device of all ranks; else each rank has a fake one.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient, Ring
from collectives.threads.run_local import run_local
from mpicomp.aggregator.algorithm import Algorithm
from tests.fake_device import FakeArray

STEPS = 4
HAS_GPU = os.environ.get("TRITON_INTERPRET") != "1"  # tests/conftest.py sets it where there is none


def vector(rank: int, step: int, n: int, dtype: str = "float32", scale: float = 1.0) -> NDArray[Any]:
    """Normal numbers and zeros; uint16 for bfloat16."""
    values = np.random.default_rng((rank, step)).standard_normal(n) * scale
    values[::7] = 0
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def given(values: NDArray[Any], dtype: str, index: int | None) -> Any:
    """Return a rank's array, on the device of this index or on the host."""
    if index is not None and not HAS_GPU:
        return FakeArray(values, dtype, index)
    if index is not None or dtype == "bfloat16":
        tensor = torch.from_numpy(values.view(np.int16) if dtype == "bfloat16" else values)
        tensor = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
        return tensor if index is None else tensor.to("cuda")
    return values


def bits(result: Any) -> NDArray[Any]:
    """Return a copy of a result, as words."""
    if isinstance(result, FakeArray):
        result = result.there
    elif not isinstance(result, np.ndarray):
        host = result.cpu()
        result = (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy()
    return np.array(result).view(f"u{result.itemsize}")


def name_of(index: int) -> str:
    """Return the name of a rank's device."""
    return f"cuda:{0 if HAS_GPU else index}"


def start(comm: Communicator, method: Algorithm, n: int, dtype: str, there: bool, lengths: Any = None) -> Any:
    device = name_of(comm.rank) if there else "cpu"
    return method.start(comm, n, dtype=dtype, tensor_lengths=lengths, device=device)


def train(
    comm: Communicator,
    method: Algorithm,
    n: int,
    dtype: str,
    on_devices: tuple[int, ...],
    lengths: Any = None,
    scale: float = 1.0,
) -> list[NDArray[Any]]:
    """All results, and the last state.

    Half way each rank of a job with devices goes on where it was not: from the device to the CPU, or the other way.
    """
    there, results = comm.rank in on_devices, []
    aggregator = start(comm, method, n, dtype, there, lengths)
    for step in range(STEPS):
        if step == STEPS // 2:
            state, there = aggregator.state_dict(), bool(on_devices) and not there
            aggregator = start(comm, method, n, dtype, there, lengths)
            aggregator.load_state_dict(state)
        x = given(vector(comm.rank, step, n, dtype, scale), dtype, comm.rank if there else None)
        results.append(bits(aggregator.aggregate(x)))
    state = aggregator.state_dict()
    told = getattr(aggregator.feedback, "clipped_fraction", 0.0)
    return [*results, np.array(told), *(np.asarray(state[key]) for key in sorted(state) if key != "method")]


def assert_same_as_on_cpu(
    method: Algorithm, n: int, dtype: str, lengths: Any = None, scale: float = 1.0, ranks: int = 2
) -> None:
    """Fail unless ranks with and without a device, the last one, have the bits of ranks without any."""
    here, there = (
        run_local(ranks, lambda comm, on=on: train(comm, method, n, dtype, on, lengths, scale), Ring(), piece_bytes=512)
        for on in ((), (ranks - 1,))
    )
    for rank in range(ranks):
        for mine, expected in zip(there[rank], here[rank], strict=True):
            np.testing.assert_array_equal(mine, expected)


def assert_nan_is_told_and_nothing_lost(method: Algorithm, n: int, dtype: str, bad_rank: int) -> None:
    """Fail unless all ranks hear which one had NaN, and go on as if the step had not been; rank 0 has a device."""

    def take(comm: Communicator) -> None:
        there = comm.rank == 0
        aggregator = start(comm, method, n, dtype, there)
        without = start(comm, method, n, dtype, there)

        def step(number: int, nan: bool = False, one: Any = aggregator) -> NDArray[Any]:
            values = vector(comm.rank, number, n, dtype)
            if nan and comm.rank == bad_rank:
                values[n - 3] = 0x7FC0 if dtype == "bfloat16" else np.nan
            return bits(one.aggregate(given(values, dtype, comm.rank if there else None)))

        step(0)
        before = aggregator.state_dict()
        with pytest.raises(NonFiniteGradient, match=f"from rank {bad_rank};"):
            step(1, nan=True)
        after = aggregator.state_dict()
        for key, value in before.items():
            np.testing.assert_array_equal(after[key], value, key)
        step(0, one=without)
        np.testing.assert_array_equal(step(2), step(2, one=without))

    run_local(2, take, Ring())
