"""Long vectors have the bits of the CPU while copies and kernels of several calls run at once, as a GPU runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator, Ring
from collectives.threads.run_local import run_local
from mpicomp import Auto, Dense, Marsit
from tests.methods import METHODS
from tests.unit.kernels.gpu.on_device import HAS_GPU, bits, given, name_of, vector

pytestmark = pytest.mark.usefixtures("made")

LENGTHS = (1_500_001, 1_499_000, 70) if HAS_GPU else (4500, 3900, 70)
N = sum(-(-length // 64) * 64 for length in LENGTHS)
PIECE_BYTES = 1 << 18 if HAS_GPU else 512
STEPS = 3
ON_DEVICES = [
    name
    for name, one in METHODS.items()
    if isinstance(one, Dense) or (one.encodes_on_devices("float32") and not isinstance(one, Auto))
]
# The interpreter is slow, and other tests have all methods on short vectors.
NAMES = ON_DEVICES if HAS_GPU else ["marsit", "qsgd", "scalecom"]


def results(comm: Communicator, method: Any, n: int, there: bool) -> list[Any]:
    """Return the bits of results of calls that are in flight two at a time, and of the last residual."""
    device = name_of(comm.rank) if there else "cpu"
    both = [method.start(comm, n, vector_id=k, tensor_lengths=LENGTHS, device=device) for k in range(2)]
    found: list[Any] = []
    for step in range(STEPS):
        index = comm.rank if there else None
        xs = [given(vector(comm.rank, 2 * step + k, n), "float32", index) for k in range(2)]
        calls = [one.begin(x) for one, x in zip(both, xs, strict=True)]
        found += [bits(call.wait()) for call in calls]
    return [*found, *(value for key, value in both[1].state_dict().items() if isinstance(value, np.ndarray))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_two_long_calls_in_flight_have_the_bits_of_the_cpu(name: str) -> None:
    there, here = (
        run_local(2, lambda comm, on=on: results(comm, METHODS[name], N, on), Ring(), piece_bytes=PIECE_BYTES)
        for on in (True, False)
    )
    for mine, expected in zip(there, here, strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not HAS_GPU, reason="looks at the memory of a GPU")
def test_memory_of_a_gpu_returns_when_aggregators_are_gone() -> None:
    def take() -> None:
        run_local(2, lambda comm: results(comm, Marsit(), N, True), Ring())

    take()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        take()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 16)
