"""Finite but huge vectors: every method gives all ranks one result or one error, and an error loses nothing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient
from mpicomp.algorithms import (
    ALGORITHMS,
    ECQSGD,
    QSGD,
    SSDM,
    DoubleSqueeze,
    EFSignSGD,
    LocalTopK,
    Marsit,
    MemSGD,
    ScaleCom,
    TernGrad,
)
from tests.mpi.collectives.conftest import TIMEOUT_S
from tests.mpi.collectives.lanes import same_everywhere

N, STEPS = 700, 4
METHODS: dict[str, Any] = {
    **{name: method() for name, method in ALGORITHMS.items()},
    "ecq-sgd, much": ECQSGD(alpha=1.5, beta=0.9, bucket=100, norm="linf"),
    "qsgd, l2": QSGD(norm="l2", bucket=100, coding="entropy"),
    "terngrad, unclipped": TernGrad(bucket=100, clip=None),
    "ef-signsgd, buckets": EFSignSGD(bucket=100),
    "ssdm, momentum": SSDM(momentum=0.9, scale="norm"),
    "local top-k": LocalTopK(7),
    "scalecom, filtered": ScaleCom(7, beta=0.3, warmup_steps=1),
    **{
        f"double-squeeze, {codec}": DoubleSqueeze(codec)
        for codec in (
            "two-means:bucket=100",
            "quantize:bucket=100",
            "ternary:bucket=100",
            "top-k:rate=7",
            "clip:bits=11",
        )
    },
    "double-squeeze, sparse": DoubleSqueeze("random-sparsification:p=0.3"),
    "mem-sgd, sparse": MemSGD("random-sparsification:p=0.3"),
}


PATTERNS: tuple[tuple[str, Any], ...] = (
    ("one rank", np.float32),
    ("ups and downs", np.float32),
    ("all ranks", np.float32),
    ("all ranks", np.float16),
    ("ups and downs", np.float64),
)


def huge(pattern: str, comm: Communicator, step: int, dtype: Any) -> NDArray[Any]:
    """Vectors near the end of a type's range, or within a tenth of it on the first step."""
    largest = float(np.finfo(dtype).max) * (0.09 if step == 0 else 0.99)
    rng = np.random.default_rng((comm.rank, step))
    if pattern == "one rank":
        return np.full(N, largest if comm.rank == comm.size - 1 else 1, dtype)
    if pattern == "ups and downs":
        return (largest * rng.choice([-1, 0, 1], N)).astype(dtype)
    return (largest * rng.uniform(0.3, 1, N)).astype(dtype)


@pytest.mark.parametrize("name", METHODS)
def test_overflow_is_one_error_for_all_ranks_and_changes_nothing(mpi_comm: MPI.Intracomm, name: str) -> None:
    method, told = METHODS[name], 0
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        for pattern, dtype in PATTERNS:
            tried, untried = method.start(comm, N, dtype=dtype), method.start(comm, N, dtype=dtype)
            for step in range(STEPS):
                vector = huge(pattern, comm, step, dtype)
                before = tried.state_dict()
                result, error = outcome(tried, vector)
                assert len(set(comm.mpi_comm.allgather(error))) == 1, (pattern, dtype, step)
                if error is None:
                    assert np.isfinite(result).all(), (pattern, dtype, step)
                    assert same_everywhere(comm, result), (pattern, dtype, step)
                    np.testing.assert_array_equal(result, untried.aggregate(vector))
                    continue
                told += 1
                if isinstance(method, Marsit):
                    tried.load_state_dict(before)  # it says that it must be restored
                np.testing.assert_equal(tried.state_dict(), before)
    if name == "double-squeeze":
        assert told  # or there was nothing to see


def outcome(aggregator: Any, vector: NDArray[Any]) -> tuple[Any, str | None]:
    """The result, or what every rank should be told."""
    try:
        return aggregator.aggregate(vector), None
    except NonFiniteGradient as error:
        return None, re.sub(r"^rank \d+ of", "rank ? of", str(error))
