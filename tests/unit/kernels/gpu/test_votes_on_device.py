"""Methods that count signs have the bits of the CPU where they encode on a device, and ranks of both kinds mix."""

from __future__ import annotations

from typing import Any

import pytest

from collectives import Communicator
from mpicomp import SSDM, EFSignSGD, MajorityVote, Marsit
from mpicomp.aggregator.algorithm import Algorithm
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu.on_device import (
    assert_nan_is_told_and_nothing_lost,
    assert_same_as_on_cpu,
    vector,
)

pytestmark = pytest.mark.usefixtures("made")

TENSORS = (500, 100), 640  # 12 elements of padding between them, and 28 behind


@pytest.mark.parametrize(
    ("method", "n", "dtype", "lengths", "ranks"),
    [
        (MajorityVote(), 4200, "float32", None, 2),
        (MajorityVote(), 333, "bfloat16", None, 3),
        (MajorityVote(), 300, "float64", None, 2),
        (SSDM(scale="norm", momentum=0.9), 640, "float32", TENSORS[0], 2),
        (SSDM(scale="norm", coding="elias"), 333, "float16", None, 3),
        (SSDM(momentum=0.5), 333, "float64", None, 2),
        (SSDM(), 333, "bfloat16", None, 2),
        (EFSignSGD(), 4200, "float32", None, 2),
        (EFSignSGD(bucket=77), 640, "float32", TENSORS[0], 3),
        (EFSignSGD(bucket=5000), 4500, "bfloat16", None, 2),
        (EFSignSGD(), 640, "float64", TENSORS[0], 2),
    ],
    ids=str,
)
def test_results_and_states_are_those_of_the_cpu(
    method: Algorithm, n: int, dtype: str, lengths: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 1 has a device. Vectors of several pieces go piece by piece, while others are encoded."""
    if n > 4096:
        monkeypatch.setattr("mpicomp.reducers.vote_count.BRIEF_ELEMENTS", 0)
    assert_same_as_on_cpu(method, n, dtype, lengths, ranks=ranks)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter
def test_norms_beyond_the_squares_that_float64_holds_are_those_of_the_cpu() -> None:
    assert_same_as_on_cpu(SSDM(scale="norm", momentum=0.5), 300, "float64", scale=1e200)


@pytest.mark.parametrize("method", [MajorityVote(), SSDM(momentum=0.5), EFSignSGD(bucket=100)], ids=str)
@pytest.mark.parametrize(("bad_rank", "dtype"), [(0, "float32"), (1, "float32"), (0, "bfloat16")])
def test_nan_is_told_on_all_ranks_and_nothing_is_lost(method: Algorithm, bad_rank: int, dtype: str) -> None:
    assert_nan_is_told_and_nothing_lost(method, 500, dtype, bad_rank)


@pytest.mark.parametrize(
    ("method", "beside"), [(MajorityVote(), 16), (SSDM(), 3 * 8 + 4 + 8), (EFSignSGD(), 4 * 8 + 2 * 4)], ids=str
)
def test_only_signs_and_sums_of_blocks_cross(method: Algorithm, beside: int, made: dict[int, FakeDevice]) -> None:
    n = 8192 + 64
    with Communicator() as comm:
        aggregator = method.start(comm, n, device="cuda")
        for step in range(2):
            made[0].copied.clear()
            aggregator.aggregate(FakeArray(vector(0, step, n)))
        assert sum(made[0].copied) <= 2 * n // 8 + beside


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize(
    "method",
    [MajorityVote(), SSDM(scale="norm"), EFSignSGD(), Marsit(full_precision_every=2), Marsit(winners=2)],
    ids=lambda method: f"{type(method).__name__}-{getattr(method, 'winners', None)}",
)
def test_the_shortest_vectors_are_encoded_too(method: Algorithm, n: int) -> None:
    assert_same_as_on_cpu(method, n, "bfloat16")
